#!/usr/bin/env bash
# The agent of run_search_agent.sh under verl: GRPO with Qwen3-4B-Instruct-2507. Needs an environment of verl's own with
# skyrl-agent in it (PYTHON=...). Written against verl 0.8's settings; not run.
#
#   python -m skyrl_gym.tools.retrieval ...                     # see examples/search; port 8000
#   python examples/agent/data/search-r1.py --output_dir ~/data/agent_search
#   PYTHON=python bash examples/agent/search/run_verl_search_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_search}"
: "${NUM_GPUS:=8}"

"${PYTHON:?the Python of an environment with verl}" -m verl.trainer.main_ppo \
  +skyrl_agent.task_yaml="$root/examples/agent/search/search.yaml" \
  actor_rollout_ref.rollout.agent.agent_loop_manager_class=skyrl_agent.integrations.verl.verl_async_manager.SkyAgentLoopManager \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.model.path=Qwen/Qwen3-4B-Instruct-2507 \
  actor_rollout_ref.actor.optim.lr=2e-6 \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/validation.parquet" \
  data.train_batch_size=512 \
  data.max_prompt_length=2048 \
  data.max_response_length=8000 \
  data.return_raw_chat=true \
  trainer.n_gpus_per_node="$NUM_GPUS" \
  trainer.nnodes=1 \
  trainer.total_epochs=1 \
  trainer.project_name=agent \
  trainer.experiment_name=search \
  "$@"
