#!/usr/bin/env bash
# An agent that reads long texts section by section: GRPO with Qwen3-8B, as in MemAgent.
# Data: uv run examples/agent/data/memagent.py --output_dir ~/data/agent_memory --num_documents 200
: "${DATA_DIR:=$HOME/data/agent_memory}"
source "$(dirname "$0")/../../common.sh"
train generator.task="$here/memory.yaml" generator.n_samples_per_prompt=8 trainer.policy.model.path=Qwen/Qwen3-8B \
  trainer.algorithm.use_kl_loss=false trainer.policy.optimizer_config.lr=1e-6 trainer.max_prompt_length=8192 \
  trainer.epochs=1 trainer.train_batch_size=32 trainer.policy_mini_batch_size=32 \
  trainer.micro_forward_batch_size_per_gpu=2 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.eval_batch_size=128 trainer.eval_interval=10 trainer.ckpt_interval=10 \
  trainer.project_name=agent trainer.run_name=memory "$@"
