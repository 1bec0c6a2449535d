#!/usr/bin/env bash
# DAPO on AIME 2024 with $MODEL (Qwen3-4B-Base unless set), on one machine with 8 GPUs: see examples/recipes/dapo.
NUM_NODES="${NUM_NODES:-1}" exec bash "$(dirname "$0")/../../recipes/dapo/run_qwen3_4b_base.sh" "$@"
