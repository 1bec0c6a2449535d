#!/usr/bin/env bash
# SkyRL-SQL (examples/recipes/skyrl_sql), but every turn is a training sample of its own, with the conversation before it
# as prompt. GRPO compares whole conversations, and all turns of one get its advantage. Turns that only append to what
# stood before are joined again where that saves work (generator.merge_stepwise_output): with a chat template that
# rewrites earlier turns (drops their thoughts, say) they stay apart, each exactly as the model saw it.
#
#   uv run bash examples/recipes/skyrl_sql/data.sh
#   uv run bash examples/step_wise/run_text2sql_step_wise.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/../recipes/skyrl_sql/run_qwen2.5_coder_7b_conversation.sh" \
  trainer.algorithm.policy_loss_type=dual_clip \
  trainer.micro_train_batch_size_per_gpu=2 \
  generator.step_wise_trajectories=true \
  generator.merge_stepwise_output=true \
  trainer.run_name=skyrl_sql_7b_step_wise \
  "$@"
