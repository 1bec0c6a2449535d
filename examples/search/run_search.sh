#!/usr/bin/env bash
# Search-R1 with Qwen2.5-3B-Instruct, up to four turns: see examples/recipes/search_r1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/search_r1/run_qwen2.5_3b_4_turns.sh" "$@"
