#!/usr/bin/env bash
# Qwen3-4B-Base divided by megatron-core (tensor 4, two stages) on one machine with 8 GPUs.
#
#   uv run bash examples/recipes/dapo/run_qwen3_4b_base_megatron.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-4B-Base}" FIGURES="${FIGURES:-later}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  trainer.strategy=megatron \
  trainer.policy.megatron_config.tensor_model_parallel_size=4 \
  trainer.policy.megatron_config.pipeline_model_parallel_size=2 \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_4b_base_megatron.yaml" \
  trainer.run_name=dapo_qwen3_4b_base_megatron \
  "$@"
