#!/usr/bin/env bash
# mini-SWE-agent, unchanged, with the settings of run_shell_agent.sh except these. MINI_SWE_AGENT is its virtual
# environment: python -m venv FOLDER && FOLDER/bin/pip install mini-swe-agent==2.4.6
source "$(dirname "$0")/../common.sh"
: "${MINI_SWE_AGENT:=$root/.venv}"
RUN_DIR="${RUN_DIR:-$root/runs/harness-mini-swe-agent}" exec bash "$here/run_shell_agent.sh" \
  trainer.run_name=mini-swe-agent generator.harness.deadline_seconds=180 \
  'generator.harness.command=["'"$MINI_SWE_AGENT"'/bin/mini","-c","'"$here"'/mini_swe_agent.yaml","-m","openai/{model}","-t","{task}","-o","trajectory.json"]' \
  'generator.harness.visible=["'"$here"'","'"$MINI_SWE_AGENT"'"]' \
  '+generator.harness.env={MSWEA_CONFIGURED:"true",MSWEA_SILENT_STARTUP:"1",LITELLM_LOCAL_MODEL_COST_MAP:"True"}' "$@"
