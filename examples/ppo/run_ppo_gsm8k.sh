#!/usr/bin/env bash
# PPO with a critic on GSM8K with Qwen2.5-1.5B-Instruct, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/ppo/run_ppo_gsm8k.sh [key=value ...]
set -euo pipefail

# The critic begins as the policy's model with a head for values, and takes turns with it on the same GPUs.
bash "$(dirname "${BASH_SOURCE[0]}")/../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.advantage_estimator=gae \
  trainer.algorithm.gamma=1.0 \
  trainer.algorithm.lambd=1.0 \
  trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.critic.optimizer_config.lr=5e-6 \
  trainer.critic_mini_batch_size=256 \
  trainer.placement.critic_num_gpus_per_node="${NUM_GPUS:-4}" \
  trainer.run_name=gsm8k_1.5b_ppo \
  "$@"
