#!/usr/bin/env bash
# A Python program (openai_agents_program.py, langgraph_program.py, smolagents_program.py, or yours) in place of the shell script of
# run_shell_agent.sh, whose settings hold but for these. PROGRAM_ENV is the environment that has its packages.
#
#   PROGRAM=file PROGRAM_ENV=FOLDER MODEL=folder DATA_DIR=folder [RUN_DIR=folder] bash examples/harness/run_python_program.sh [key=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
: "${PROGRAM:?set PROGRAM to the file of a program}"
: "${PROGRAM_ENV:=$root/.venv}"
# The sandbox shows whole paths alone.
PROGRAM="$(cd "$(dirname "$PROGRAM")" && pwd)/$(basename "$PROGRAM")"
PROGRAM_ENV="$(cd "$PROGRAM_ENV" && pwd)"

RUN_DIR="${RUN_DIR:-$root/runs/harness-program}" bash "$here/run_shell_agent.sh" \
  trainer.run_name="$(basename "$PROGRAM" .py)" \
  'generator.harness.command=["'"$PROGRAM_ENV"'/bin/python","'"$PROGRAM"'","{task}"]' \
  'generator.harness.visible=["'"$(dirname "$PROGRAM")"'","'"$PROGRAM_ENV"'"]' \
  '+generator.harness.env={OPENAI_AGENTS_DISABLE_TRACING:"1"}' \
  generator.harness.deadline_seconds=180 \
  "$@"
