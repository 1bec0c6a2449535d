#!/usr/bin/env bash
# A custom advantage estimator (main_custom_advantage_estimator.py) on GSM8K, on one machine with 4 GPUs.
PYTHONPATH="$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}" ENTRY_POINT=main_custom_advantage_estimator \
  exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_custom_advantage_estimator \
  trainer.algorithm.advantage_estimator=simple_baseline trainer.algorithm.use_kl_loss=false "$@"
