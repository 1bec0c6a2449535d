#!/usr/bin/env bash
# Qwen2.5-Math-7B on one machine with 8 GPUs. Its config has a context of 4,096 tokens, so engines would refuse or truncate
# longer samples. 32,768 replaces it, in training and in evaluation (run_evaluation.sh with the same setting).
export MODEL="${MODEL:-Qwen/Qwen2.5-Math-7B}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}" RECIPE_ROW="${RECIPE_ROW:-qwen2.5_math_7b}"
exec bash "$(dirname "$0")/train.sh" +trainer.policy.model_config_kwargs.max_position_embeddings=32768 \
  trainer.micro_forward_batch_size_per_gpu=16 trainer.micro_train_batch_size_per_gpu=16 trainer.eval_interval=10 "$@"
