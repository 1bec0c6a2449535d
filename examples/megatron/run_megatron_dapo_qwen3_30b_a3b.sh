#!/usr/bin/env bash
# DAPO with Qwen3-30B-A3B-Base under Megatron: see examples/recipes/dapo.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/dapo/run_qwen3_30b_a3b_base_megatron.sh" "$@"
