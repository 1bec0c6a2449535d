#!/usr/bin/env bash
# Qwen2.5-3B-Instruct with up to 4 turns: 3 searches and the answer. On one machine with 8 GPUs. Start serve.sh first.
MAX_TURNS=4 exec bash "$(dirname "$0")/qwen2.5_3b.sh" "$@"
