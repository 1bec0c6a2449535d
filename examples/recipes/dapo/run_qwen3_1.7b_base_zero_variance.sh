#!/usr/bin/env bash
# Qwen3-1.7B-Base without prompts whose samples all have the same reward: the later repeat with that filter.
FIGURES="${FIGURES:-later}" RECIPE_ROW="${RECIPE_ROW:-qwen3_1.7b_base_zero_variance}" \
  exec bash "$(dirname "$0")/run_qwen3_1.7b_base.sh" trainer.algorithm.zero_variance_filter=true "$@"
