#!/usr/bin/env bash
# An agent at a shell: GRPO with Qwen3-4B-Instruct.
# Data: uv run examples/agent/terminal/terminal_dataset.py --output_dir ~/data/agent_terminal
: "${DATA_DIR:=$HOME/data/agent_terminal}"
source "$(dirname "$0")/../../common.sh"
train generator.task="$here/terminal.yaml" trainer.policy.model.path=Qwen/Qwen3-4B-Instruct-2507 \
  trainer.algorithm.use_kl_loss=false trainer.policy.optimizer_config.lr=2e-6 trainer.max_prompt_length=2048 \
  trainer.epochs=1 trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 generator.n_samples_per_prompt=8 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=2 \
  trainer.eval_batch_size=64 trainer.eval_interval=20 trainer.ckpt_interval=20 \
  trainer.project_name=agent trainer.run_name=terminal "$@"
