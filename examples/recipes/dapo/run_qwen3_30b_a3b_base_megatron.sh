#!/usr/bin/env bash
# Qwen3-30B-A3B-Base on two machines with 8 GPUs: tensor 4, experts over 8 ranks, weights of stale tokens truncated at 2.
export MODEL="${MODEL:-Qwen/Qwen3-30B-A3B-Base}" FIGURES="${FIGURES:-later}" RECIPE_ROW="${RECIPE_ROW:-qwen3_30b_a3b_base_megatron}"
export NUM_NODES="${NUM_NODES:-2}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}" ENGINE_MEMORY="${ENGINE_MEMORY:-0.7}"
exec bash "$(dirname "$0")/train.sh" trainer.strategy=megatron \
  trainer.policy.megatron_config.tensor_model_parallel_size=4 \
  trainer.policy.megatron_config.expert_model_parallel_size=8 \
  trainer.policy.megatron_config.expert_tensor_parallel_size=1 \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token \
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=2 "$@"
