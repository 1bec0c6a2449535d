#!/usr/bin/env bash
# Qwen3-4B-Base on two machines with 8 GPUs, weights divided within each; NUM_NODES=1 for one machine, as the table says.
#
#   uv run bash examples/recipes/dapo/run_qwen3_4b_base.sh [key=value ...]                    # FIGURES=later: later repeats
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-4B-Base}"
bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_1.7b_base.sh" \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_4b_base.yaml" \
  trainer.run_name=dapo_qwen3_4b_base \
  "$@"
