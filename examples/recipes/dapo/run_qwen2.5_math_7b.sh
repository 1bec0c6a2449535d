#!/usr/bin/env bash
# Qwen2.5-Math-7B on one machine with 8 GPUs. Its config says that it reads 4,096 tokens: engines would refuse longer
# ones, or cut them. 32,768 replaces that, in training and in evaluation (run_evaluation.sh with the same setting).
#
#   uv run bash examples/recipes/dapo/run_qwen2.5_math_7b.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen2.5-Math-7B}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  +trainer.policy.model_config_kwargs.max_position_embeddings=32768 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=16 \
  trainer.eval_interval=10 \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen2.5_math_7b.yaml" \
  trainer.run_name=dapo_qwen2.5_math_7b \
  "$@"
