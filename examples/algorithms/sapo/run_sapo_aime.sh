#!/usr/bin/env bash
# SAPO (a soft gate in place of the clip) on DAPO-Math-17k, evaluated on AIME 2024, on one machine with 8 GPUs.
#
#   uv run examples/aime/aime_dataset.py --output_dir ~/data/dapo
#   uv run bash examples/algorithms/sapo/run_sapo_aime.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../dapo/run_dapo_aime.sh" \
  trainer.algorithm.policy_loss_type=sapo \
  trainer.algorithm.sapo.tau_pos=1.0 \
  trainer.algorithm.sapo.tau_neg=1.05 \
  trainer.algorithm.loss_reduction=sequence_mean \
  trainer.policy.optimizer_config.num_warmup_steps=80 \
  trainer.ckpt_interval=-1 \
  trainer.run_name=sapo_aime \
  "$@"
