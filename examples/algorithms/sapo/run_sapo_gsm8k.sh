#!/usr/bin/env bash
# SAPO (a soft gate in place of the clip) on GSM8K, on one machine with 4 GPUs.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_sapo \
  trainer.algorithm.policy_loss_type=sapo trainer.algorithm.loss_reduction=sequence_mean \
  trainer.algorithm.sapo.tau_pos=1.0 trainer.algorithm.sapo.tau_neg=1.05 trainer.algorithm.use_kl_loss=false "$@"
