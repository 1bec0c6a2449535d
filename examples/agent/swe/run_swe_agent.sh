#!/usr/bin/env bash
# SA-SWE with Qwen3-32B: see examples/recipes/swe.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../recipes/swe/run_qwen3_32b.sh" "$@"
