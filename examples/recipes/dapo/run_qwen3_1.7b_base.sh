#!/usr/bin/env bash
# Qwen3-1.7B-Base on two machines with 8 GPUs, weights divided within each; NUM_NODES=1 for one machine, as the table says.
#
#   uv run bash examples/recipes/dapo/run_qwen3_1.7b_base.sh [key=value ...]                  # the first table
#   FIGURES=later bash examples/recipes/dapo/run_qwen3_1.7b_base.sh [key=value ...]    # later repeats
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-1.7B-Base}" NUM_NODES="${NUM_NODES:-2}" NUM_GPUS="${NUM_GPUS:-8}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  trainer.policy.fsdp_config.fsdp_size="$NUM_GPUS" \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_1.7b_base.yaml" \
  trainer.run_name=dapo_qwen3_1.7b_base \
  "$@"
