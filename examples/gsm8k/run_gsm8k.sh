#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct: see examples/recipes/gsm8k.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/gsm8k/run_qwen2.5_1.5b.sh" "$@"
