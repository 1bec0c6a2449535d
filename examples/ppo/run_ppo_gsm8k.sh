#!/usr/bin/env bash
# PPO with a critic on GSM8K with Qwen2.5-1.5B-Instruct, on one machine with 4 GPUs.
# The critic is initialized from the policy's model with a value head, and shares the GPUs with it.
exec bash "$(dirname "$0")/../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_ppo \
  trainer.algorithm.advantage_estimator=gae trainer.algorithm.gamma=1.0 trainer.algorithm.lambd=1.0 \
  trainer.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct trainer.critic.optimizer_config.lr=5e-6 \
  trainer.critic_mini_batch_size=256 trainer.placement.critic_num_gpus_per_node="${NUM_GPUS:-4}" "$@"
