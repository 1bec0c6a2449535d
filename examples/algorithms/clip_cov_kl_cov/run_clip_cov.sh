#!/usr/bin/env bash
# Clip-Cov (a few tokens that reduce entropy lose their gradient) on GSM8K, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_clip_cov \
  trainer.algorithm.policy_loss_type=clip_cov trainer.algorithm.clip_cov.clip_ratio=0.0002 \
  trainer.algorithm.clip_cov.clip_cov_lb=1.0 trainer.algorithm.clip_cov.clip_cov_ub=5.0 \
  trainer.algorithm.use_kl_loss=false "$@"
