#!/usr/bin/env bash
# Search-R1 with Qwen3-30B-A3B under Megatron: see examples/recipes/search_r1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/search_r1/run_qwen3_30b_a3b_megatron_4_turns.sh" "$@"
