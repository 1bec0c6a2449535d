#!/usr/bin/env bash
# KL-Cov (a penalty on the tokens that reduce entropy) on GSM8K, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_kl_cov \
  trainer.algorithm.policy_loss_type=kl_cov trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.kl_cov.kl_cov_frac=0.2 trainer.algorithm.kl_cov.ppo_kl_coef=1.0 "$@"
