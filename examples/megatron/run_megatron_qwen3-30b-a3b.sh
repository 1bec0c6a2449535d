#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-30B-A3B on two machines with 8 GPUs each: tensor 4, two stages, experts over 8 ranks.
NUM_GPUS="${NUM_GPUS:-8}" exec bash "$(dirname "$0")/run_megatron.sh" trainer.policy.model.path=Qwen/Qwen3-30B-A3B \
  trainer.placement.{policy,ref}_num_nodes=2 \
  trainer.{policy,ref}.megatron_config.{tensor_model_parallel_size=4,pipeline_model_parallel_size=2} \
  trainer.{policy,ref}.megatron_config.expert_{model_parallel_size=8,tensor_parallel_size=1} \
  generator.num_inference_engines=2 generator.inference_engine_tensor_parallel_size=8 \
  trainer.run_name=qwen3_30b_a3b_tp4_pp2_ep8 "$@"
