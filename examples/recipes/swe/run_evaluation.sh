#!/usr/bin/env bash
# Resolves SWE-bench Verified once with $MODEL, behind an OpenAI-compatible server at $API_URL, and prints the row of the
# table beside the published one: pass@1 with its 95 % interval. Run it again to go on after an interruption.
#
#   python -m skyrl_train.entrypoints.serve trainer.policy.model.path=exports/global_step_40/policy   # another terminal
#   MODEL=exports/global_step_40/policy ROW=qwen3_32b bash examples/recipes/swe/run_evaluation.sh [option ...]
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
: "${MODEL:?set MODEL to the folder or hub name that is served}"
: "${API_URL:=http://127.0.0.1:8000}"
: "${ROW:=qwen3_32b}"
mkdir -p "$OUTPUT/swe"
task="$OUTPUT/swe/$ROW.yaml"
printf 'extends: %s\ngenerator: {backend_config: {model_name: %s, api_url: "%s"}}\n' \
  "$swe/$ROW.yaml" "$MODEL" "$API_URL" > "$task"
"$PYTHON" -m skyrl_agent.evaluate "$task" "$DATA_DIR/validation.parquet" --output "$OUTPUT/swe/$ROW.jsonl" "$@"
"$PYTHON" "$recipes/table.py" swe "$ROW" "$OUTPUT/swe/$ROW.jsonl"
