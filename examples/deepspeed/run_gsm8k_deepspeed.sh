#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct under DeepSpeed's stage 3, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/../recipes/gsm8k/run_qwen2.5_1.5b.sh" trainer.run_name=gsm8k_1.5b_deepspeed \
  trainer.strategy=deepspeed deepspeed_config.train.zero_optimization.stage=3 \
  trainer.micro_forward_batch_size_per_gpu=40 trainer.micro_train_batch_size_per_gpu=40 "$@"
