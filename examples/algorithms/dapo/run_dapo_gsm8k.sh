#!/usr/bin/env bash
# DAPO on GSM8K, on one machine with 4 GPUs: asymmetric clip, dynamic sampling, overlong filter and penalty.
exec bash "$(dirname "$0")/../../gsm8k/run_gsm8k.sh" trainer.run_name=gsm8k_1.5b_dapo \
  trainer.algorithm.policy_loss_type=dual_clip trainer.algorithm.clip_ratio_c=10.0 \
  trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 \
  trainer.algorithm.loss_reduction=token_mean trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.dynamic_sampling.type=filter trainer.algorithm.dynamic_sampling.max_sample_batches=30 \
  trainer.algorithm.overlong_buffer.len=512 trainer.algorithm.overlong_buffer.penalty_factor=1.0 \
  trainer.policy.optimizer_config.weight_decay=0.1 trainer.policy.optimizer_config.num_warmup_steps=160 \
  generator.apply_overlong_filtering=true generator.sampling_params.max_generate_length=1024 "$@"
