#!/usr/bin/env bash
# An agent that researches questions on the web: GRPO with Qwen3-8B.
# Data: uv run examples/agent/data/deep_research.py --output_dir ~/data/agent_research
# Services: export GOOGLE_SEARCH_KEY=... STEM_LLM_JUDGE_URL=http://...
: "${DATA_DIR:=$HOME/data/agent_research}" "${NUM_GPUS:=4}"
source "$(dirname "$0")/../../common.sh"
train generator.task="$here/research.yaml" generator.n_samples_per_prompt=8 trainer.policy.model.path=Qwen/Qwen3-8B \
  trainer.algorithm.use_kl_loss=true trainer.algorithm.kl_loss_coef=0.001 \
  trainer.algorithm.eps_clip_low=0.4 trainer.algorithm.eps_clip_high=0.4 \
  trainer.policy.optimizer_config.lr=5e-6 trainer.max_prompt_length=4096 \
  trainer.epochs=1 trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=1 trainer.micro_train_batch_size_per_gpu=1 \
  trainer.eval_batch_size=128 trainer.eval_interval=10 trainer.ckpt_interval=10 \
  trainer.project_name=agent trainer.run_name=research "$@"
