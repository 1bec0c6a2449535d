#!/usr/bin/env bash
# DAPO on GSM8K with truncated importance sampling: a token's loss is weighted by trainer over engine, at most 2.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/tis_correction/run_dapo_tis.sh [key=value ...]
set -euo pipefail

# How far engine and trainer are apart is measured with or without it: policy/rollout_train_*.
bash "$(dirname "${BASH_SOURCE[0]}")/../dapo/run_dapo_gsm8k.sh" \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token \
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 \
  generator.sampling_params.logprobs=0 \
  trainer.run_name=gsm8k_1.5b_dapo_tis \
  "$@"
