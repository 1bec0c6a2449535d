#!/usr/bin/env bash
# SkyRL-SQL with Qwen2.5-Coder-7B-Instruct, up to six turns: see examples/recipes/skyrl_sql.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/skyrl_sql/run_qwen2.5_coder_7b.sh" "$@"
