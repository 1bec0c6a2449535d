#!/usr/bin/env bash
# Makes .venv with everything in it. Arguments go to `uv sync`, e.g. `scripts/setup.sh --extra tracking --group bench`.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null 2>&1 || python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet --user uv || python3 -m pip install --quiet uv
uv=(uv); command -v uv >/dev/null 2>&1 || uv=(python3 -m uv)
# A folder of wheels, such as one that holds a CPU build of torch, is given to pip by PIP_FIND_LINKS: uv gets the same.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
exec "${uv[@]}" sync --all-packages "$@"
