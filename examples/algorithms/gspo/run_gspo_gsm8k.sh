#!/usr/bin/env bash
# GSPO (one ratio a sequence) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/gspo/run_gspo_gsm8k.sh [key=value ...]
set -euo pipefail

# Ratios of sequences are close to 1, so their bounds are, too (https://arxiv.org/abs/2507.18071, section 5.1).
bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=gspo \
  trainer.algorithm.loss_reduction=sequence_mean \
  trainer.algorithm.eps_clip_low=3e-4 \
  trainer.algorithm.eps_clip_high=4e-4 \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_gspo \
  "$@"
