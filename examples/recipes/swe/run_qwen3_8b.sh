#!/usr/bin/env bash
# Qwen3-8B without thinking, v0: 25 steps.
#
#   uv run bash examples/recipes/swe/run_qwen3_8b.sh [key=value ...]
set -euo pipefail

export MODEL="${MODEL:-Qwen/Qwen3-8B}" TASK=qwen3_8b.yaml
bash "$(dirname "${BASH_SOURCE[0]}")/v0.sh" \
  trainer.max_training_steps=25 \
  generator.sampling_params.temperature=0.6 \
  generator.sampling_params.top_p=0.95 \
  generator.sampling_params.top_k=20 \
  generator.sampling_params.repetition_penalty=1.5 \
  trainer.run_name=swe_qwen3_8b \
  "$@"
