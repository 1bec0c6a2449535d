#!/usr/bin/env bash
# Competitive programming, graded by tests in a sandbox. GRPO with Qwen2.5-3B-Instruct.
# Data: uv run examples/lcb/lcb_dataset.py --output_dir ~/data/lcb
: "${DATA_DIR:=$HOME/data/lcb}" "${NUM_GPUS:=4}" "${INFERENCE_BACKEND:=native}"
source "$(dirname "$0")/../common.sh"
train environment.env_class=lcb trainer.policy.model.path=Qwen/Qwen2.5-3B-Instruct \
  trainer.algorithm.use_kl_loss=true trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=10 trainer.train_batch_size=16 trainer.policy_mini_batch_size=4 generator.n_samples_per_prompt=5 \
  trainer.micro_forward_batch_size_per_gpu=1 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.max_prompt_length=29000 generator.sampling_params.max_generate_length=3000 \
  trainer.eval_before_train=false trainer.eval_batch_size=64 trainer.eval_interval=5 trainer.ckpt_interval=10 \
  trainer.resume_mode=null trainer.project_name=lcb trainer.run_name=lcb_3b "$@"
