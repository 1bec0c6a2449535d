#!/usr/bin/env bash
# The run of run_qwen2.5_coder_7b.sh with one turn: the solution alone.
MAX_TURNS=1 exec bash "$(dirname "$0")/run_qwen2.5_coder_7b.sh" "$@"
