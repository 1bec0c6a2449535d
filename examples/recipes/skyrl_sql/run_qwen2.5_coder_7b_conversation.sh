#!/usr/bin/env bash
# The later variant in which every turn is a message of its own, ended by the end token after the stop text.
#
#   uv run bash examples/recipes/skyrl_sql/run_qwen2.5_coder_7b_conversation.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen2.5_coder_7b.sh" \
  generator.use_conversation_multi_turn=true \
  generator.append_eos_token_after_stop_str_in_multi_turn=true \
  trainer.run_name=skyrl_sql_7b_conversation \
  "$@"
