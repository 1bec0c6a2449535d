#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct on one GPU: the smallest real run.
#
#   python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   bash examples/gsm8k/run_gsm8k_1gpu_0.5b.sh [key=value ...]
set -euo pipefail

NUM_GPUS=1 bash "$(dirname "${BASH_SOURCE[0]}")/run_gsm8k.sh" \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.train_batch_size=128 \
  trainer.policy_mini_batch_size=64 \
  trainer.run_name=gsm8k_0.5b \
  "$@"
