#!/usr/bin/env bash
# Qwen3-8B without thinking, v0: 25 steps.
MODEL="${MODEL:-Qwen/Qwen3-8B}" TASK=qwen3_8b.yaml exec bash "$(dirname "$0")/v0.sh" \
  generator.sampling_params.temperature=0.6 generator.sampling_params.top_p=0.95 generator.sampling_params.top_k=20 \
  generator.sampling_params.repetition_penalty=1.5 trainer.max_training_steps=25 trainer.run_name=swe_qwen3_8b "$@"
