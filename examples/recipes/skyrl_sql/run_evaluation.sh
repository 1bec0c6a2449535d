#!/usr/bin/env bash
# Answers the five Spider sets greedily with $MODEL, with one turn and with five, and prints both rows of the table
# beside the published ones. Execution accuracy, by Spider's rule of equal results.
#
#   MODEL=exports/global_step_60/policy ROW=multi bash examples/recipes/skyrl_sql/run_evaluation.sh [key=value ...]
#
# ROW: base, single or multi, what the model was trained with. SETS and EVAL_TURNS choose a part.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
: "${MODEL:?set MODEL to a folder or a hub name}"
: "${ROW:=$(basename "$MODEL")}"
: "${SETS:=spider_dev spider_test spider_realistic spider_dk spider_syn}"
files=$(printf "'$DATA_DIR/%s/validation.parquet'," $SETS)
for num_turns in ${EVAL_TURNS:-1 5}; do
  turns "$num_turns"
  evaluate "skyrl_sql/${ROW}_${num_turns}_turns" "${sql[@]}" data.val_data="[${files%,}]" \
    environment.skyrl_gym.text2sql.rule=spider "$@"
  "$PYTHON" "$recipes/table.py" skyrl_sql "${ROW}_${num_turns}_turns" "$OUTPUT/skyrl_sql/${ROW}_${num_turns}_turns"
done
