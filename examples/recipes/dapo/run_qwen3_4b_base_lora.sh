#!/usr/bin/env bash
# Adapters on Qwen3-4B-Base, on one machine with 8 GPUs. The table gives neither rank nor learning rate: these are ours.
#
#   uv run bash examples/recipes/dapo/run_qwen3_4b_base_lora.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-4B-Base}" FIGURES="${FIGURES:-later}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  trainer.policy.model.lora.rank=128 \
  trainer.policy.model.lora.alpha=128 \
  trainer.policy.optimizer_config.lr=1e-5 \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_4b_base_lora.yaml" \
  trainer.run_name=dapo_qwen3_4b_base_lora \
  "$@"
