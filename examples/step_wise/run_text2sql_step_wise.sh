#!/usr/bin/env bash
# SkyRL-SQL (examples/recipes/skyrl_sql) with one training sample per turn, whose prompt is the conversation before it.
# GRPO compares whole conversations, and all turns of one get its advantage. Turns that only append to their prompt are
# merged where that saves work (generator.merge_stepwise_output): with a chat template that rewrites earlier turns
# (removes their thoughts, say) they remain separate, each exactly as the model saw it.
exec bash "$(dirname "$0")/../recipes/skyrl_sql/run_qwen2.5_coder_7b_conversation.sh" \
  trainer.run_name=skyrl_sql_7b_step_wise generator.step_wise_trajectories=true generator.merge_stepwise_output=true \
  trainer.algorithm.policy_loss_type=dual_clip trainer.micro_train_batch_size_per_gpu=2 "$@"
