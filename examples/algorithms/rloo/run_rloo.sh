#!/usr/bin/env bash
# RLOO (the other responses are the baseline) on GSM8K, on one machine with 4 GPUs. As in the paper, the KL divergence is
# part of the reward.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_rloo \
  trainer.algorithm.advantage_estimator=rloo trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.use_kl_in_reward=true "$@"
