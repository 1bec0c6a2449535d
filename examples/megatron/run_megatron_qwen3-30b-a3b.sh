#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-30B-A3B on two machines with 8 GPUs each: tensor 4, two stages, experts over 8 ranks.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/megatron/run_megatron_qwen3-30b-a3b.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

export NUM_GPUS="${NUM_GPUS:-8}"
exec bash "$root/examples/megatron/run_megatron.sh" \
  trainer.policy.model.path=Qwen/Qwen3-30B-A3B \
  trainer.placement.policy_num_nodes=2 \
  trainer.placement.ref_num_nodes=2 \
  trainer.policy.megatron_config.tensor_model_parallel_size=4 \
  trainer.policy.megatron_config.pipeline_model_parallel_size=2 \
  trainer.policy.megatron_config.expert_model_parallel_size=8 \
  trainer.policy.megatron_config.expert_tensor_parallel_size=1 \
  trainer.ref.megatron_config.tensor_model_parallel_size=4 \
  trainer.ref.megatron_config.pipeline_model_parallel_size=2 \
  trainer.ref.megatron_config.expert_model_parallel_size=8 \
  trainer.ref.megatron_config.expert_tensor_parallel_size=1 \
  generator.num_inference_engines=2 \
  generator.inference_engine_tensor_parallel_size=8 \
  trainer.run_name=qwen3_30b_a3b_tp4_pp2_ep8 \
  "$@"
