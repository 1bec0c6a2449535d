#!/usr/bin/env bash
# The agent of run_memory_agent.sh, trained through the `tinker` SDK: adapters of Qwen3-8B, on the hosted service
# (TINKER_API_KEY) or on a custom server (`tx serve --base-model Qwen/Qwen3-8B`, BASE_URL=http://127.0.0.1:8000).
: "${DATA_DIR:=$HOME/data/agent_memory}"
source "$(dirname "$0")/../../common.sh"
"$PYTHON" -m skyrl_agent.integrations.tinker.tinker_train \
  skyrl_agent_task_yaml="$here/memory.yaml" base_url="${BASE_URL:-null}" \
  dataset_file="$DATA_DIR/train.parquet" eval_dataset_file="$DATA_DIR/validation.parquet" \
  model_name=Qwen/Qwen3-8B lora_rank=128 learning_rate=4e-5 batch_size=32 group_size=8 max_steps=12 \
  normalize_advantages=false wandb_name=memory_agent "$@"
