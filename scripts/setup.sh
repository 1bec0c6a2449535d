#!/usr/bin/env bash
# Makes .venv with everything in it, on a machine with nothing but Python 3.11+ and pip.
# Arguments go to `uv sync`: scripts/setup.sh --extra tracking --group bench
set -euo pipefail
cd "$(dirname "$0")/.."

if command -v uv >/dev/null 2>&1; then
  uv=(uv)
else
  uv=(python3 -m uv)
  for how in --user "" "--user --break-system-packages"; do # a plain Python, a virtual environment, a Debian
    "${uv[@]}" --version >/dev/null 2>&1 && break
    # shellcheck disable=SC2086  # an empty choice must vanish
    python3 -m pip install --quiet --disable-pip-version-check $how uv 2>/dev/null || true
  done
  "${uv[@]}" --version >/dev/null || { echo "setup: could not install uv with 'python3 -m pip install uv'" >&2; exit 1; }
fi

# A folder of wheels that pip is told of by PIP_FIND_LINKS (one with a CPU build of torch, say) serves uv as well.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
"${uv[@]}" sync --all-packages "$@"
[ "${uv[0]}" = uv ] || echo "setup: uv is not on PATH; write 'python3 -m uv run …' for 'uv run …', or use .venv/bin/python"
