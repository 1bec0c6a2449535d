#!/usr/bin/env bash
# GSPO (one ratio per sequence) on GSM8K, on one machine with 4 GPUs.
# Ratios of sequences are close to 1, so their bounds are, too (https://arxiv.org/abs/2507.18071, section 5.1).
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_gspo \
  trainer.algorithm.policy_loss_type=gspo trainer.algorithm.loss_reduction=sequence_mean \
  trainer.algorithm.eps_clip_low=3e-4 trainer.algorithm.eps_clip_high=4e-4 trainer.algorithm.use_kl_loss=false "$@"
