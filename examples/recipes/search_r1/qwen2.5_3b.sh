#!/usr/bin/env bash
# Qwen2.5-3B-Instruct, for the scripts run_qwen2.5_3b_*_turns.sh: MAX_TURNS is theirs.
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" MAX_TURNS="${MAX_TURNS:-4}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-2}"
bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" \
  trainer.ref.fsdp_config.cpu_offload=true \
  trainer.curve_bands="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bands/qwen2.5_3b_${MAX_TURNS}_turns.yaml" \
  trainer.run_name="search_r1_3b_${MAX_TURNS}_turns" \
  "$@"
