#!/usr/bin/env bash
# Evaluates $MODEL, served at the OpenAI-compatible $API_URL, on SWE-bench Verified and prints the row of the table next to
# the published one: pass@1 with its 95 % interval. Run it again to continue after an interruption.
#   python -m skyrl_train.entrypoints.serve trainer.policy.model.path=exports/global_step_40/policy   # another terminal
#   MODEL=exports/global_step_40/policy ROW=qwen3_32b bash examples/recipes/swe/run_evaluation.sh [option ...]
source "$(dirname "$0")/settings.sh"
: "${MODEL:?set MODEL to the folder or hub name that is served}" "${ROW:=qwen3_32b}"
mkdir -p "$OUTPUT/swe"
task="$OUTPUT/swe/$ROW.yaml"
printf 'extends: %s\ngenerator: {backend_config: {model_name: %s, api_url: "%s"}}\n' \
  "$here/$ROW.yaml" "$MODEL" "${API_URL:-http://127.0.0.1:8000}" > "$task"
"$PYTHON" -m skyrl_agent.evaluate "$task" "$DATA_DIR/validation.parquet" --output "$OUTPUT/swe/$ROW.jsonl" "$@"
"$PYTHON" "$root/examples/recipes/table.py" swe "$ROW" "$OUTPUT/swe/$ROW.jsonl"
