#!/usr/bin/env bash
# CISPO (clipped importance weights, every token keeps its gradient) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/cispo/run_cispo_gsm8k.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=cispo \
  trainer.algorithm.cispo.cispo_eps_clip_low=0 \
  trainer.algorithm.cispo.cispo_eps_clip_high=5 \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_cispo \
  "$@"
