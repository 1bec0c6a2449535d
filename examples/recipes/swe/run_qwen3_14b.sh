#!/usr/bin/env bash
# Qwen3-14B with thinking, v0: 35 steps. The published run has a critic (PPO, GAE), which needs whole trajectories; where
# thoughts of earlier turns are removed every turn is a separate row, so this one compares the responses of a group.
export MODEL="${MODEL:-Qwen/Qwen3-14B}" TASK=qwen3_14b.yaml TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}"
exec bash "$(dirname "$0")/v0.sh" trainer.algorithm.use_kl_loss=false trainer.algorithm.eps_clip_high=0.28 \
  trainer.algorithm.use_entropy_loss=true trainer.algorithm.entropy_loss_coef=0.001 \
  trainer.max_training_steps=35 trainer.run_name=swe_qwen3_14b "$@"
