#!/usr/bin/env bash
# Trains on the databases' questions with $MAX_TURNS turns: settings that the rows of the table share.
source "$(dirname "$0")/settings.sh"
turns "${MAX_TURNS:?set MAX_TURNS, or run one of the scripts run_*.sh}"
train "${sql[@]}" trainer.policy.model.path="${MODEL:-Qwen/Qwen2.5-Coder-7B-Instruct}" \
  trainer.algorithm.advantage_estimator=grpo trainer.algorithm.grpo_norm_by_std=true trainer.algorithm.use_kl_loss=false \
  trainer.policy.optimizer_config.lr=1e-6 trainer.policy.optimizer_config.max_grad_norm=0.5 \
  trainer.epochs=30 trainer.train_batch_size=256 trainer.policy_mini_batch_size=256 generator.n_samples_per_prompt=5 \
  trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.eval_before_train=true trainer.eval_interval=5 trainer.ckpt_interval=60 trainer.hf_save_interval=30 \
  trainer.dump_data_batch=true trainer.resume_mode=latest trainer.project_name=skyrl_sql \
  generator.sampling_params.temperature=0.6 generator.sampling_params.top_p=0.95 "$@"
