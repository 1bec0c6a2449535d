#!/usr/bin/env bash
# Qwen3-1.7B-Base on two machines with 8 GPUs, weights sharded within each; NUM_NODES=1 for one machine, as the table says.
# FIGURES=later: later repeats.
export MODEL="${MODEL:-Qwen/Qwen3-1.7B-Base}" NUM_NODES="${NUM_NODES:-2}" NUM_GPUS="${NUM_GPUS:-8}"
export RECIPE_ROW="${RECIPE_ROW:-qwen3_1.7b_base}"
exec bash "$(dirname "$0")/train.sh" trainer.policy.fsdp_config.fsdp_size="$NUM_GPUS" "$@"
