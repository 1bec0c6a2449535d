#!/usr/bin/env bash
# SkyRL-SQL with parameters and optimizer in host memory: see examples/recipes/skyrl_sql.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/skyrl_sql/run_qwen2.5_coder_7b_deepspeed.sh" "$@"
