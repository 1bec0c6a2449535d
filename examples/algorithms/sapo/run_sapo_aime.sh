#!/usr/bin/env bash
# SAPO (a soft gate in place of the clip) on DAPO-Math-17k, evaluated on AIME 2024, on one machine with 8 GPUs.
exec bash "$(dirname "$0")/../dapo/run_dapo_aime.sh" trainer.run_name=sapo_aime \
  trainer.algorithm.policy_loss_type=sapo trainer.algorithm.loss_reduction=sequence_mean \
  trainer.algorithm.sapo.tau_pos=1.0 trainer.algorithm.sapo.tau_neg=1.05 \
  trainer.policy.optimizer_config.num_warmup_steps=80 trainer.ckpt_interval=-1 "$@"
