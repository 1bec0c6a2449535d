#!/usr/bin/env bash
# KL-Cov (the tokens that drive entropy down are held back by a penalty) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/clip_cov_kl_cov/run_kl_cov.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=kl_cov \
  trainer.algorithm.kl_cov.kl_cov_frac=0.2 \
  trainer.algorithm.kl_cov.ppo_kl_coef=1.0 \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_kl_cov \
  "$@"
