#!/usr/bin/env bash
# Makes one small environment for each version of the `tinker` SDK, for the conformance suite (python -m tx_conformance).
#   scripts/sdk_envs.sh [FOLDER] [VERSION...]     FOLDER: $TX_SDK_ENVS, or ~/.cache/skyrl-tx/sdk
# A version `cookbook-0.6.1` is tinker-cookbook with what its recipes need. FOLDER/VERSION/bin/python is the outcome. What is there already is left alone.
set -euo pipefail

folder="${1:-${TX_SDK_ENVS:-$HOME/.cache/skyrl-tx/sdk}}"
versions=("${@:2}")
[ ${#versions[@]} -gt 0 ] || versions=(0.16.1 0.24.1 0.38.0)

uv=(uv)
command -v uv >/dev/null 2>&1 || uv=(python3 -m uv)

# A folder of wheels that pip is told of by PIP_FIND_LINKS serves uv as well.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

mkdir -p "$folder"
for version in "${versions[@]}"; do
  if [ -f "$folder/$version/ready" ]; then continue; fi
  fresh="$folder/.$version.$$" # stands under its name only when it is whole: two runs at once do not meet
  trap 'rm -rf "$fresh"' EXIT
  "${uv[@]}" venv --quiet --relocatable --python 3.11 "$fresh"
  wanted=("tinker==$version")
  if [[ "$version" == cookbook-* ]]; then
    # tml-renderers serves models that are not ours; the release it asks for needs a newer Python.
    echo "tml-renderers>=0" >"$fresh/overrides.txt"
    wanted=("tinker-cookbook[math-rl]==${version#cookbook-}" torch==2.13.0 --override "$fresh/overrides.txt")
  fi
  "${uv[@]}" pip install --quiet --compile-bytecode --python "$fresh/bin/python" "${wanted[@]}"
  touch "$fresh/ready"
  mv -T "$fresh" "$folder/$version" 2>/dev/null || rm -rf "$fresh"
done
