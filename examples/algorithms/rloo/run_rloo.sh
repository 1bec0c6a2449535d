#!/usr/bin/env bash
# RLOO (the other answers are the baseline) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/rloo/run_rloo.sh [key=value ...]
set -euo pipefail

# The KL divergence is part of the reward, as in the paper.
bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.advantage_estimator=rloo \
  trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.use_kl_in_reward=true \
  trainer.run_name=gsm8k_1.5b_rloo \
  "$@"
