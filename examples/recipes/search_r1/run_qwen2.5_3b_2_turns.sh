#!/usr/bin/env bash
# Qwen2.5-3B-Instruct with up to 2 turns: 1 search and the answer. On one machine with 8 GPUs.
#
#   uv run bash examples/recipes/search_r1/serve.sh                        # in a terminal of its own: e5, flat index
#   uv run bash examples/recipes/search_r1/run_qwen2.5_3b_2_turns.sh [key=value ...]
set -euo pipefail

MAX_TURNS=2 bash "$(dirname "${BASH_SOURCE[0]}")/qwen2.5_3b.sh" "$@"
