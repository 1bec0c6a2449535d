#!/usr/bin/env bash
# GRPO on GSM8K with adapters of rank 32 on Qwen2.5-0.5B-Instruct, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/lora/run_grpo_lora_gsm8k.sh [key=value ...]
set -euo pipefail

# Adapters take a learning rate some 30 times that of full training.
bash "$(dirname "${BASH_SOURCE[0]}")/../gsm8k/run_gsm8k.sh" \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.policy.model.lora.rank=32 \
  trainer.policy.model.lora.alpha=32 \
  trainer.policy.optimizer_config.lr=3e-5 \
  trainer.run_name=gsm8k_0.5b_lora \
  "$@"
