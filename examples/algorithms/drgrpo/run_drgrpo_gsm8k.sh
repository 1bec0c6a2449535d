#!/usr/bin/env bash
# Dr. GRPO (no division by lengths or standard deviations) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/drgrpo/run_drgrpo_gsm8k.sh [key=value ...]
set -euo pipefail

# The divisor of every sequence is trainer.algorithm.max_seq_len, by default the longest prompt and answer.
bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.grpo_norm_by_std=false \
  trainer.algorithm.loss_reduction=seq_mean_token_sum_norm \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_drgrpo \
  "$@"
