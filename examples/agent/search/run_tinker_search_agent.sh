#!/usr/bin/env bash
# The agent of run_search_agent.sh, trained through the `tinker` SDK: adapters of Qwen3-4B-Instruct-2507, on the hosted
# service (TINKER_API_KEY) or on a custom server (`tx serve --base-model …`, BASE_URL=http://127.0.0.1:8002).
: "${DATA_DIR:=$HOME/data/agent_search}"
source "$(dirname "$0")/../../common.sh"
"$PYTHON" -m skyrl_agent.integrations.tinker.tinker_train \
  skyrl_agent_task_yaml="$here/search.yaml" base_url="${BASE_URL:-null}" \
  dataset_file="$DATA_DIR/train.parquet" eval_dataset_file="$DATA_DIR/validation.parquet" \
  model_name=Qwen/Qwen3-4B-Instruct-2507 lora_rank=32 learning_rate=4e-5 batch_size=512 wandb_name=search_agent "$@"
