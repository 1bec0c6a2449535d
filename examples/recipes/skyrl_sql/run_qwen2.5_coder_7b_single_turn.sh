#!/usr/bin/env bash
# The same run with one turn: the solution at once.
#
#   uv run bash examples/recipes/skyrl_sql/run_qwen2.5_coder_7b_single_turn.sh [key=value ...]
set -euo pipefail

MAX_TURNS=1 bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen2.5_coder_7b.sh" "$@"
