#!/usr/bin/env bash
# Qwen3-4B-Base on two machines with 8 GPUs, weights sharded within each; NUM_NODES=1 for one machine, as the table says.
# FIGURES=later: later repeats.
MODEL="${MODEL:-Qwen/Qwen3-4B-Base}" RECIPE_ROW="${RECIPE_ROW:-qwen3_4b_base}" exec bash "$(dirname "$0")/run_qwen3_1.7b_base.sh" "$@"
