#!/usr/bin/env bash
# Qwen2.5-32B with responses of up to 20,480 tokens, every sequence over 4 ranks. "Several nodes": here four with 8 GPUs.
export MODEL="${MODEL:-Qwen/Qwen2.5-32B}" FIGURES="${FIGURES:-later}" RECIPE_ROW="${RECIPE_ROW:-qwen2.5_32b}"
export NUM_NODES="${NUM_NODES:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
exec bash "$(dirname "$0")/train.sh" trainer.policy.sequence_parallel_size=4 \
  trainer.micro_forward_batch_size_per_gpu=2 trainer.micro_train_batch_size_per_gpu=2 \
  generator.sampling_params.max_generate_length=20480 "$@"
