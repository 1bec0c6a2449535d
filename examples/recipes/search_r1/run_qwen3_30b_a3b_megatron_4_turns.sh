#!/usr/bin/env bash
# Qwen3-30B-A3B with up to 4 turns on four machines with 8 GPUs: tensor 2, experts over 8 ranks, engines of 8 GPUs.
#
#   uv run bash examples/recipes/search_r1/serve.sh                        # in a terminal of its own: e5, flat index
#   uv run bash examples/recipes/search_r1/run_qwen3_30b_a3b_megatron_4_turns.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-30B-A3B}" MAX_TURNS="${MAX_TURNS:-4}" FIGURES="${FIGURES:-later}"
export NUM_NODES="${NUM_NODES:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}" ENGINE_MEMORY="${ENGINE_MEMORY:-0.6}"
layout=()
for model in policy ref; do
  layout+=(
    trainer.$model.megatron_config.tensor_model_parallel_size=2
    trainer.$model.megatron_config.expert_model_parallel_size=8
    trainer.$model.megatron_config.expert_tensor_parallel_size=1
  )
done
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "${layout[@]}" \
  trainer.strategy=megatron \
  trainer.micro_forward_batch_size_per_gpu=2 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen3_30b_a3b_megatron_4_turns.yaml" \
  trainer.run_name=search_r1_30b_a3b_4_turns \
  "$@"
