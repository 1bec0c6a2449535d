#!/usr/bin/env bash
# Evaluates $MODEL greedily on the seven sets with up to $MAX_TURNS turns, and prints the column of the table next to the
# published one: exact match with its 95 % interval.
#   MODEL=exports/global_step_330/policy ROW=3_turns MAX_TURNS=3 bash examples/recipes/search_r1/run_evaluation.sh
source "$(dirname "$0")/settings.sh"
evaluate search_r1 "${ROW:-${MAX_TURNS}_turns}" "${search[@]}" "$@"
