#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct on one GPU: see examples/recipes/gsm8k.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/gsm8k/run_qwen2.5_0.5b.sh" "$@"
