#!/usr/bin/env bash
# The agent of run_search_agent.sh, trained through the `tinker` SDK: adapters of Qwen3-4B-Instruct-2507, on the hosted
# service (TINKER_API_KEY) or on a server of yours (`tx serve --base-model …`, BASE_URL=http://127.0.0.1:8002).
#
#   python -m skyrl_gym.tools.retrieval ...                     # see examples/search; port 8000
#   uv run examples/agent/data/search-r1.py --output_dir ~/data/agent_search
#   uv run bash examples/agent/search/run_tinker_search_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_search}"
: "${BASE_URL:=null}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_agent.integrations.tinker.tinker_train \
  skyrl_agent_task_yaml="$root/examples/agent/search/search.yaml" \
  dataset_file="$DATA_DIR/train.parquet" \
  eval_dataset_file="$DATA_DIR/validation.parquet" \
  base_url="$BASE_URL" \
  model_name=Qwen/Qwen3-4B-Instruct-2507 \
  lora_rank=32 \
  learning_rate=4e-5 \
  batch_size=512 \
  wandb_name=search_agent \
  "$@"
