#!/usr/bin/env bash
# Evaluates $MODEL (a folder under exports, or a hub name) on AIME 2024 with 32 samples and prints the row of the table
# next to the published one: pass@32, mean@32, the score, each with its 95 % interval.
#   MODEL=exports/global_step_320/policy ROW=qwen2.5_math_7b bash examples/recipes/dapo/run_evaluation.sh [key=value ...]
source "$(dirname "$0")/settings.sh"
evaluate dapo "${ROW:-}" "${aime[@]}" "$@"
