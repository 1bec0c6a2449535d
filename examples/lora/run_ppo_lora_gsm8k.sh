#!/usr/bin/env bash
# PPO with a critic on GSM8K, policy and critic with adapters of rank 32, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/lora/run_ppo_lora_gsm8k.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo_lora_gsm8k.sh" \
  trainer.algorithm.advantage_estimator=gae \
  trainer.critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.critic.model.lora.rank=32 \
  trainer.critic.model.lora.alpha=32 \
  trainer.critic.optimizer_config.lr=3e-5 \
  trainer.critic_mini_batch_size=256 \
  trainer.placement.critic_num_gpus_per_node="${NUM_GPUS:-4}" \
  trainer.run_name=gsm8k_0.5b_lora_ppo \
  "$@"
