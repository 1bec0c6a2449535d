#!/usr/bin/env bash
# Qwen3-30B-A3B with up to 4 turns on four machines with 8 GPUs: tensor 2, experts over 8 ranks, engines of 8 GPUs. Start
# serve.sh first.
export MODEL="${MODEL:-Qwen/Qwen3-30B-A3B}" MAX_TURNS="${MAX_TURNS:-4}" FIGURES="${FIGURES:-later}"
export NUM_NODES="${NUM_NODES:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-8}" ENGINE_MEMORY="${ENGINE_MEMORY:-0.6}"
folder="$(cd "$(dirname "$0")" && pwd)"
exec bash "$folder/train.sh" trainer.strategy=megatron \
  trainer.{policy,ref}.megatron_config.{tensor_model_parallel_size=2,expert_model_parallel_size=8} \
  trainer.{policy,ref}.megatron_config.expert_tensor_parallel_size=1 \
  trainer.micro_forward_batch_size_per_gpu=2 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.curve_bands="$folder/bands/qwen3_30b_a3b_megatron_4_turns.yaml" \
  trainer.run_name=search_r1_30b_a3b_4_turns "$@"
