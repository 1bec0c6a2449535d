#!/usr/bin/env bash
# PPO with a critic on GSM8K, policy and critic with adapters of rank 32, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/run_grpo_lora_gsm8k.sh" trainer.run_name=gsm8k_0.5b_lora_ppo \
  trainer.algorithm.advantage_estimator=gae trainer.critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.critic.model.lora.rank=32 trainer.critic.model.lora.alpha=32 trainer.critic.optimizer_config.lr=3e-5 \
  trainer.critic_mini_batch_size=256 trainer.placement.critic_num_gpus_per_node="${NUM_GPUS:-4}" "$@"
