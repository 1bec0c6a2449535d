#!/usr/bin/env bash
# Answers the 1,319 test problems with $MODEL and prints the share of right ones with its 95 % interval.
#
#   MODEL=exports/global_step_140/policy bash examples/recipes/gsm8k/run_evaluation.sh [key=value ...]
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
: "${MODEL:?set MODEL to a folder or a hub name}"
: "${ROW:=$(basename "$MODEL")}"
evaluate "gsm8k/$ROW" "${gsm8k[@]}" "$@"
"$PYTHON" "$recipes/table.py" gsm8k "$ROW" "$OUTPUT/gsm8k/$ROW"
