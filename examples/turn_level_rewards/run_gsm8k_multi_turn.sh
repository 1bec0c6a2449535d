#!/usr/bin/env bash
# GSM8K in up to five turns, with a reward in every turn: a small one for a well-formed response, 1 for the right one. The
# advantage of a turn is the reward earned from it on, compared with the same turn of the prompt's other samples
# (advantage_estimator=turn_grpo); gamma discounts a reward for each later turn. Qwen2.5-0.5B-Instruct on one GPU.
# Data: uv run examples/gsm8k_multi_turn/gsm8k_multi_turn_dataset.py --output_dir ~/data/gsm8k_multi_turn
: "${DATA_DIR:=$HOME/data/gsm8k_multi_turn}" "${NUM_GPUS:=1}" "${INFERENCE_BACKEND:=native}"
source "$(dirname "$0")/../common.sh"
train environment.env_class=gsm8k_multi_turn trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.algorithm.advantage_estimator=turn_grpo trainer.algorithm.gamma=1.0 trainer.algorithm.use_kl_loss=true \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 trainer.train_batch_size=256 trainer.policy_mini_batch_size=128 generator.n_samples_per_prompt=5 \
  trainer.micro_forward_batch_size_per_gpu=16 trainer.micro_train_batch_size_per_gpu=8 \
  generator.max_turns=5 generator.max_input_length=4096 trainer.eval_batch_size=1024 \
  trainer.resume_mode=null trainer.project_name=gsm8k trainer.run_name=gsm8k_multi_turn_0.5b "$@"
