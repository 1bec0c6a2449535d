#!/usr/bin/env bash
# The later variant in which every turn is a separate message, terminated by the end token after the stop text.
exec bash "$(dirname "$0")/run_qwen2.5_coder_7b.sh" trainer.run_name=skyrl_sql_7b_conversation \
  generator.use_conversation_multi_turn=true generator.append_eos_token_after_stop_str_in_multi_turn=true "$@"
