#!/usr/bin/env bash
# DAPO on GSM8K with truncated importance sampling: a token's loss is weighted by trainer over engine, at most 2.
# The mismatch of engine and trainer is measured with or without it: policy/rollout_train_*.
exec bash "$(dirname "$0")/../dapo/run_dapo_gsm8k.sh" trainer.run_name=gsm8k_1.5b_dapo_tis \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token generator.sampling_params.logprobs=0 \
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 "$@"
