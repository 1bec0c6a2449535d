#!/usr/bin/env bash
# CISPO (clipped importance weights, every token keeps its gradient) on GSM8K, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_cispo \
  trainer.algorithm.policy_loss_type=cispo trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.cispo.cispo_eps_clip_low=0 trainer.algorithm.cispo.cispo_eps_clip_high=5 "$@"
