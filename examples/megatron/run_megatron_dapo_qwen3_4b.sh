#!/usr/bin/env bash
# DAPO with Qwen3-4B-Base under Megatron: see examples/recipes/dapo.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/dapo/run_qwen3_4b_base_megatron.sh" "$@"
