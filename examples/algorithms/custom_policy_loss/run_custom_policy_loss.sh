#!/usr/bin/env bash
# A custom policy loss (main_custom_policy_loss.py) on GSM8K, on one machine with 4 GPUs.
PYTHONPATH="$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}" ENTRY_POINT=main_custom_policy_loss \
  exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_custom_policy_loss \
  trainer.algorithm.policy_loss_type=reinforce trainer.algorithm.use_kl_loss=false "$@"
