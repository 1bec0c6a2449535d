#!/usr/bin/env bash
# Answers AIME 2024 32 times with $MODEL (a folder under exports, or a hub name) and prints the row of the table beside
# the published one: pass@32, mean@32, the score, each with its 95 % interval.
#
#   MODEL=exports/global_step_320/policy ROW=qwen2.5_math_7b bash examples/recipes/dapo/run_evaluation.sh [key=value ...]
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
: "${MODEL:?set MODEL to a folder or a hub name}"
: "${ROW:=$(basename "$MODEL")}"
evaluate "dapo/$ROW" "${aime[@]}" "$@"
"$PYTHON" "$recipes/table.py" dapo "$ROW" "$OUTPUT/dapo/$ROW"
