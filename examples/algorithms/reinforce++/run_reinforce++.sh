#!/usr/bin/env bash
# REINFORCE++ (no critic and no groups) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/reinforce++/run_reinforce++.sh [key=value ...]
set -euo pipefail

# reinforce++_baseline compares with the other answers to a prompt before it normalises over the batch.
bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.advantage_estimator=reinforce++ \
  trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.use_kl_in_reward=true \
  trainer.algorithm.kl_estimator_type=k2 \
  trainer.run_name=gsm8k_1.5b_reinforce++ \
  "$@"
