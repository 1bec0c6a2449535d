#!/usr/bin/env bash
# On-policy distillation: Qwen3-4B scores the tokens that Qwen3-1.7B-Base samples. See docs/distillation.md.
# Data: uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
: "${DATA_DIR:=$HOME/data/gsm8k}" "${NUM_GPUS:=4}" "${INFERENCE_BACKEND:=native}"
ENTRY_POINT=skyrl_train.entrypoints.main_distill
source "$(dirname "$0")/../common.sh"
train trainer.policy.model.path="${STUDENT:-Qwen/Qwen3-1.7B-Base}" trainer.policy.optimizer_config.lr=1e-5 \
  trainer.distillation.teachers.main.model="${TEACHER:-Qwen/Qwen3-4B}" trainer.distillation.tokens=sampled \
  trainer.epochs=20 trainer.train_batch_size=512 trainer.policy_mini_batch_size=512 \
  trainer.micro_forward_batch_size_per_gpu=16 trainer.micro_train_batch_size_per_gpu=8 \
  generator.sampling_params.max_generate_length=2048 trainer.eval_batch_size=1024 \
  trainer.resume_mode=null trainer.project_name=on_policy_distillation trainer.run_name=qwen3_1.7b_from_4b "$@"
