#!/usr/bin/env bash
# Evaluates $MODEL greedily on the five Spider sets, with one turn and with five, and prints both rows of the table next to
# the published ones. Execution accuracy, by Spider's rule of equal results.
#   MODEL=exports/global_step_60/policy ROW=multi bash examples/recipes/skyrl_sql/run_evaluation.sh [key=value ...]
# ROW: base, single or multi, what the model was trained with. SETS and EVAL_TURNS choose a part.
source "$(dirname "$0")/settings.sh"
files=$(printf "'$DATA_DIR/%s/validation.parquet'," \
  ${SETS:-spider_dev spider_test spider_realistic spider_dk spider_syn})
for num_turns in ${EVAL_TURNS:-1 5}; do
  turns "$num_turns"
  evaluate skyrl_sql "${ROW:-$(basename "${MODEL:-}")}_${num_turns}_turns" "${sql[@]}" data.val_data="[${files%,}]" \
    environment.skyrl_gym.text2sql.rule=spider "$@"
done
