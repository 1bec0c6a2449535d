#!/usr/bin/env bash
# REINFORCE++ (no critic and no groups) on GSM8K, on one machine with 4 GPUs.
# reinforce++_baseline subtracts the mean of a prompt's responses before it normalises over the batch.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_reinforce++ \
  trainer.algorithm.advantage_estimator=reinforce++ trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.use_kl_in_reward=true trainer.algorithm.kl_estimator_type=k2 "$@"
