#!/usr/bin/env bash
# An agent that researches questions on the web: GRPO with Qwen3-8B.
#
#   uv run examples/agent/data/deep_research.py --output_dir ~/data/agent_research
#   export GOOGLE_SEARCH_KEY=... STEM_LLM_JUDGE_URL=http://...
#   uv run bash examples/agent/research/run_research_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_research}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  generator.task="$root/examples/agent/research/research.yaml" \
  generator.n_samples_per_prompt=8 \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen3-8B \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.algorithm.kl_loss_coef=0.001 \
  trainer.algorithm.eps_clip_low=0.4 \
  trainer.algorithm.eps_clip_high=0.4 \
  trainer.policy.optimizer_config.lr=5e-6 \
  trainer.epochs=1 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=1 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.max_prompt_length=4096 \
  trainer.eval_batch_size=128 \
  trainer.eval_interval=10 \
  trainer.ckpt_interval=10 \
  trainer.logger="$LOGGER" \
  trainer.project_name=agent \
  trainer.run_name=research \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
