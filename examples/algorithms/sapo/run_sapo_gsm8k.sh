#!/usr/bin/env bash
# SAPO (a soft gate in place of the clip) on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/sapo/run_sapo_gsm8k.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../../gsm8k/run_gsm8k.sh" \
  trainer.algorithm.policy_loss_type=sapo \
  trainer.algorithm.sapo.tau_pos=1.0 \
  trainer.algorithm.sapo.tau_neg=1.05 \
  trainer.algorithm.loss_reduction=sequence_mean \
  trainer.algorithm.use_kl_loss=false \
  trainer.run_name=gsm8k_1.5b_sapo \
  "$@"
