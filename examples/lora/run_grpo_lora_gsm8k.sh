#!/usr/bin/env bash
# GRPO on GSM8K with adapters of rank 32 on Qwen2.5-0.5B-Instruct, on one machine with 4 GPUs.
# Adapters take a learning rate about 30 times higher than full training.
exec bash "$(dirname "$0")/../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_0.5b_lora \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct trainer.policy.optimizer_config.lr=3e-5 \
  trainer.policy.model.lora.rank=32 trainer.policy.model.lora.alpha=32 "$@"
