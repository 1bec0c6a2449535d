#!/usr/bin/env bash
# Clip-Cov (a few tokens that drive entropy down lose their gradient) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/clip_cov_kl_cov/run_clip_cov.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=clip_cov \
  trainer.algorithm.clip_cov.clip_ratio=0.0002 \
  trainer.algorithm.clip_cov.clip_cov_lb=1.0 \
  trainer.algorithm.clip_cov.clip_cov_ub=5.0 \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_clip_cov \
  "$@"
