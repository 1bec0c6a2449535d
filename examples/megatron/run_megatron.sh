#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-0.6B, its layers in two stages and each divided over two ranks, on one machine with 4 GPUs.
#
#   uv run bash examples/recipes/gsm8k/data.sh
#   uv run bash examples/megatron/run_megatron.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-0.6B}" INFERENCE_BACKEND="${INFERENCE_BACKEND:-vllm}"
bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/gsm8k/run_qwen2.5_1.5b.sh" \
  trainer.strategy=megatron \
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \
  trainer.policy.megatron_config.pipeline_model_parallel_size=2 \
  trainer.ref.megatron_config.tensor_model_parallel_size=2 \
  trainer.ref.megatron_config.pipeline_model_parallel_size=2 \
  trainer.train_batch_size=128 \
  trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=4 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=false \
  trainer.project_name=gsm8k_megatron \
  trainer.run_name=qwen3_0.6b_tp2_pp2 \
  generator.gpu_memory_utilization=0.7 \
  "$@"
