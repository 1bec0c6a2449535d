#!/usr/bin/env bash
# The agent of run_memory_agent.sh, trained through the `tinker` SDK: adapters of Qwen3-8B, on the hosted service
# (TINKER_API_KEY) or on a server of yours (`tx serve --base-model Qwen/Qwen3-8B`, BASE_URL=http://127.0.0.1:8000).
#
#   uv run examples/agent/data/memagent.py --output_dir ~/data/agent_memory --num_documents 200
#   uv run bash examples/agent/memory/run_tinker_memory_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_memory}"
: "${BASE_URL:=null}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_agent.integrations.tinker.tinker_train \
  skyrl_agent_task_yaml="$root/examples/agent/memory/memory.yaml" \
  dataset_file="$DATA_DIR/train.parquet" \
  eval_dataset_file="$DATA_DIR/validation.parquet" \
  base_url="$BASE_URL" \
  model_name=Qwen/Qwen3-8B \
  lora_rank=128 \
  learning_rate=4e-5 \
  batch_size=32 \
  group_size=8 \
  max_steps=12 \
  normalize_advantages=false \
  wandb_name=memory_agent \
  "$@"
