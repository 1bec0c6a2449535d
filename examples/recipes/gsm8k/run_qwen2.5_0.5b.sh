#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct on one GPU: the smallest real run.
MODEL="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" NUM_GPUS="${NUM_GPUS:-1}" exec bash "$(dirname "$0")/run_qwen2.5_1.5b.sh" \
  trainer.train_batch_size=128 trainer.policy_mini_batch_size=64 trainer.run_name=gsm8k_0.5b "$@"
