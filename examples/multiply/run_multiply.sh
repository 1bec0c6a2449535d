#!/usr/bin/env bash
# Multiplication, in up to five turns: a wrong response may be corrected. GRPO with Qwen2.5-1.5B-Instruct.
# Data: uv run examples/multiply/multiply_dataset.py --output_dir ~/data/multiply --num_digits 4
: "${DATA_DIR:=$HOME/data/multiply}" "${NUM_GPUS:=4}" "${INFERENCE_BACKEND:=native}"
source "$(dirname "$0")/../common.sh"
train environment.env_class=multiply trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.algorithm.use_kl_loss=true trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 trainer.train_batch_size=512 trainer.policy_mini_batch_size=128 generator.n_samples_per_prompt=5 \
  trainer.micro_forward_batch_size_per_gpu=16 trainer.micro_train_batch_size_per_gpu=8 \
  generator.max_turns=5 generator.max_input_length=4096 trainer.eval_batch_size=200 \
  trainer.resume_mode=null trainer.project_name=multiply trainer.run_name=multiply_1.5b "$@"
