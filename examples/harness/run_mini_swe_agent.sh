#!/usr/bin/env bash
# mini-SWE-agent, unchanged, in place of the shell script of run_shell_agent.sh, whose settings hold but for these.
# Install it into an environment of its own: python -m venv FOLDER && FOLDER/bin/pip install mini-swe-agent==2.4.6
#
#   MINI_SWE_AGENT=FOLDER MODEL=folder DATA_DIR=folder [RUN_DIR=folder] bash examples/harness/run_mini_swe_agent.sh [key=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
: "${MINI_SWE_AGENT:=$root/.venv}"

RUN_DIR="${RUN_DIR:-$root/runs/harness-mini-swe-agent}" bash "$here/run_shell_agent.sh" \
  trainer.run_name=mini-swe-agent \
  'generator.harness.command=["'"$MINI_SWE_AGENT"'/bin/mini","-c","'"$here"'/mini_swe_agent.yaml","-m","openai/{model}","-t","{task}","-o","trajectory.json"]' \
  'generator.harness.visible=["'"$here"'","'"$MINI_SWE_AGENT"'"]' \
  '+generator.harness.env={MSWEA_CONFIGURED:"true",MSWEA_SILENT_STARTUP:"1",LITELLM_LOCAL_MODEL_COST_MAP:"True"}' \
  generator.harness.deadline_seconds=180 \
  "$@"
