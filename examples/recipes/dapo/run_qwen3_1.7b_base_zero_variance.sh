#!/usr/bin/env bash
# Qwen3-1.7B-Base without the prompts whose answers all earn the same: the later repeat with that filter.
#
#   uv run bash examples/recipes/dapo/run_qwen3_1.7b_base_zero_variance.sh [key=value ...]
set -euo pipefail

FIGURES="${FIGURES:-later}" bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_1.7b_base.sh" \
  trainer.algorithm.zero_variance_filter=true \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_1.7b_base_zero_variance.yaml" \
  trainer.run_name=dapo_qwen3_1.7b_base_zero_variance \
  "$@"
