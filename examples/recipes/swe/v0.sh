#!/usr/bin/env bash
# Settings that the runs of v0 share: GRPO with a KL term on one machine with 8 GPUs. The figures come from another
# trainer; settings that it does not name are from train.sh.
exec bash "$(dirname "$0")/train.sh" \
  trainer.algorithm.advantage_estimator=grpo trainer.algorithm.policy_loss_type=regular \
  trainer.algorithm.use_kl_loss=true trainer.algorithm.kl_loss_coef=0.001 trainer.algorithm.kl_estimator_type=k3 \
  trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.2 \
  trainer.epochs=40 trainer.train_batch_size=32 trainer.policy_mini_batch_size=32 generator.n_samples_per_prompt=8 \
  trainer.max_prompt_length=12000 generator.sampling_params.max_generate_length=32768 "$@"
