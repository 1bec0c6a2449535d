#!/usr/bin/env bash
# Qwen3-4B-Base divided by megatron-core (tensor 4, two stages) on one machine with 8 GPUs.
export MODEL="${MODEL:-Qwen/Qwen3-4B-Base}" FIGURES="${FIGURES:-later}" RECIPE_ROW="${RECIPE_ROW:-qwen3_4b_base_megatron}"
exec bash "$(dirname "$0")/train.sh" trainer.strategy=megatron \
  trainer.policy.megatron_config.tensor_model_parallel_size=4 \
  trainer.policy.megatron_config.pipeline_model_parallel_size=2 "$@"
