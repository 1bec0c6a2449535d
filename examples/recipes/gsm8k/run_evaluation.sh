#!/usr/bin/env bash
# Evaluates $MODEL on the 1,319 test problems and prints its accuracy with the 95 % interval.
#   MODEL=exports/global_step_140/policy bash examples/recipes/gsm8k/run_evaluation.sh [key=value ...]
source "$(dirname "$0")/settings.sh"
evaluate gsm8k "${ROW:-}" "${gsm8k[@]}" "$@"
