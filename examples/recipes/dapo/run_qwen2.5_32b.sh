#!/usr/bin/env bash
# Qwen2.5-32B with responses of up to 20,480 tokens, every sequence over 4 ranks. "Several nodes": here four with 8 GPUs.
#
#   uv run bash examples/recipes/dapo/run_qwen2.5_32b.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen2.5-32B}" FIGURES="${FIGURES:-later}"
export NUM_NODES="${NUM_NODES:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  trainer.policy.sequence_parallel_size=4 \
  trainer.micro_forward_batch_size_per_gpu=2 \
  trainer.micro_train_batch_size_per_gpu=2 \
  generator.sampling_params.max_generate_length=20480 \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen2.5_32b.yaml" \
  trainer.run_name=dapo_qwen2.5_32b \
  "$@"
