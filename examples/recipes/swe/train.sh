#!/usr/bin/env bash
# Trains an agent that resolves issues in container images: settings that the runs of both tables share. $TASK is the
# task file of the run: agent, turns, lengths, sampling, parallel agents.
source "$(dirname "$0")/settings.sh"
: "${MODEL:?set MODEL, or run one of the scripts run_*.sh}" "${TASK:?set TASK, or run one of the scripts run_*.sh}"
train generator.task="$here/$TASK" environment.env_class=null trainer.policy.model.path="$MODEL" \
  trainer.strategy=fsdp2 trainer.policy.optimizer_config.lr=1e-6 \
  trainer.micro_forward_batch_size_per_gpu=1 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.eval_before_train=false trainer.eval_batch_size=128 trainer.eval_interval=10 \
  trainer.ckpt_interval=2 trainer.max_ckpts_to_keep=20 trainer.dump_data_batch=true trainer.resume_mode=latest \
  trainer.seed=1 trainer.project_name=swe \
  generator.enforce_eager=false generator.enable_prefix_caching=true generator.max_num_batched_tokens=16384 "$@"
