#!/usr/bin/env bash
# Adapters on Qwen3-4B-Base, on one machine with 8 GPUs. The table gives neither rank nor learning rate: these are ours.
export MODEL="${MODEL:-Qwen/Qwen3-4B-Base}" FIGURES="${FIGURES:-later}" RECIPE_ROW="${RECIPE_ROW:-qwen3_4b_base_lora}"
exec bash "$(dirname "$0")/train.sh" trainer.policy.optimizer_config.lr=1e-5 \
  trainer.policy.model.lora.rank=128 trainer.policy.model.lora.alpha=128 "$@"
