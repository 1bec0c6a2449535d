#!/usr/bin/env bash
# Answers the seven sets greedily with $MODEL and up to $MAX_TURNS turns, and prints the column of the table beside the
# published one: exact match with its 95 % interval.
#
#   MODEL=exports/global_step_330/policy ROW=3_turns MAX_TURNS=3 bash examples/recipes/search_r1/run_evaluation.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
: "${MODEL:?set MODEL to a folder or a hub name}"
: "${ROW:=${MAX_TURNS}_turns}"
evaluate "search_r1/$ROW" "${search[@]}" "$@"
"$PYTHON" "$recipes/table.py" search_r1 "$ROW" "$OUTPUT/search_r1/$ROW"
