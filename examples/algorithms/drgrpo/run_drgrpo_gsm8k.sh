#!/usr/bin/env bash
# Dr. GRPO (no division by lengths or standard deviations) on GSM8K, on one machine with 4 GPUs.
# The divisor of every sequence is trainer.algorithm.max_seq_len, by default the longest prompt and response.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_drgrpo \
  trainer.algorithm.grpo_norm_by_std=false trainer.algorithm.loss_reduction=seq_mean_token_sum_norm \
  trainer.algorithm.use_kl_loss=false "$@"
