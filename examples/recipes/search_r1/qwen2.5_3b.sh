#!/usr/bin/env bash
# Qwen2.5-3B-Instruct on one machine with 8 GPUs, with the $MAX_TURNS of the scripts run_qwen2.5_3b_*_turns.sh.
export MODEL="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" MAX_TURNS="${MAX_TURNS:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}"
folder="$(cd "$(dirname "$0")" && pwd)"
exec bash "$folder/train.sh" trainer.ref.fsdp_config.cpu_offload=true \
  trainer.curve_bands="$folder/bands/qwen2.5_3b_${MAX_TURNS}_turns.yaml" \
  trainer.run_name="search_r1_3b_${MAX_TURNS}_turns" "$@"
