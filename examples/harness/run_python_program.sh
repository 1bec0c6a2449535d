#!/usr/bin/env bash
# A Python program (PROGRAM=openai_agents_program.py, langgraph_program.py, smolagents_program.py or a custom one) with the
# settings of run_shell_agent.sh except these. PROGRAM_ENV is the virtual environment with its packages.
source "$(dirname "$0")/../common.sh"
: "${PROGRAM:?set PROGRAM to the file of a program}"
# The sandbox shows absolute paths only.
PROGRAM="$(cd "$(dirname "$PROGRAM")" && pwd)/$(basename "$PROGRAM")"
PROGRAM_ENV="$(cd "${PROGRAM_ENV:-$root/.venv}" && pwd)"
RUN_DIR="${RUN_DIR:-$root/runs/harness-program}" exec bash "$here/run_shell_agent.sh" \
  trainer.run_name="$(basename "$PROGRAM" .py)" generator.harness.deadline_seconds=180 \
  'generator.harness.command=["'"$PROGRAM_ENV"'/bin/python","'"$PROGRAM"'","{task}"]' \
  'generator.harness.visible=["'"$(dirname "$PROGRAM")"'","'"$PROGRAM_ENV"'"]' \
  '+generator.harness.env={OPENAI_AGENTS_DISABLE_TRACING:"1"}' "$@"
