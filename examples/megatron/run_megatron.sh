#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-0.6B, its layers in two stages and each divided over two ranks, on one machine with 4 GPUs.
MODEL="${MODEL:-Qwen/Qwen3-0.6B}" INFERENCE_BACKEND="${INFERENCE_BACKEND:-vllm}" \
  exec bash "$(dirname "$0")/../recipes/gsm8k/run_qwen2.5_1.5b.sh" trainer.strategy=megatron \
  trainer.{policy,ref}.megatron_config.{tensor,pipeline}_model_parallel_size=2 \
  trainer.train_batch_size=128 trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=false generator.gpu_memory_utilization=0.7 \
  trainer.project_name=gsm8k_megatron trainer.run_name=qwen3_0.6b_tp2_pp2 "$@"
