#!/usr/bin/env bash
# Qwen2.5-Coder-7B-Instruct with up to six turns, five queries and the solution, on one machine with 8 GPUs. Data: data.sh.
export MAX_TURNS="${MAX_TURNS:-6}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
exec bash "$(dirname "$0")/train.sh" trainer.run_name="skyrl_sql_7b_${MAX_TURNS}_turns" "$@"
