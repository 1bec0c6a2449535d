#!/usr/bin/env bash
# An agent that answers questions with a search engine: GRPO with Qwen3-4B-Instruct.
# Data: uv run examples/agent/data/search-r1.py --output_dir ~/data/agent_search
# Server on port 8000: python -m skyrl_gym.tools.retrieval --corpus corpus.jsonl --index bm25
: "${DATA_DIR:=$HOME/data/agent_search}"
source "$(dirname "$0")/../../common.sh"
train generator.task="$here/search.yaml" trainer.policy.model.path=Qwen/Qwen3-4B-Instruct-2507 \
  trainer.algorithm.use_kl_loss=false trainer.policy.optimizer_config.lr=2e-6 trainer.max_prompt_length=2048 \
  trainer.epochs=1 trainer.train_batch_size=512 trainer.policy_mini_batch_size=512 generator.n_samples_per_prompt=5 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=2 \
  trainer.eval_batch_size=512 trainer.eval_interval=20 trainer.ckpt_interval=20 \
  trainer.project_name=agent trainer.run_name=search "$@"
