#!/usr/bin/env bash
# Text to SQL as in examples/text2sql, but every turn is a training sample of its own, with the conversation before it as
# prompt. GRPO compares whole conversations, and all turns of one get its advantage. Turns that only append to what
# stood before are joined again where that saves work (generator.merge_stepwise_output): with a chat template that
# rewrites earlier turns (drops their thoughts, say) they stay apart, each exactly as the model saw it.
#
#   python examples/text2sql/text2sql_dataset.py --output_dir ~/data/sql --db_path ~/data/sql/db_files/data
#   bash examples/step_wise/run_text2sql_step_wise.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/sql}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"
: "${DB_PATH:=$DATA_DIR/db_files/data}"

"${PYTHON:-$root/.venv/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=text2sql \
  environment.skyrl_gym.text2sql.db_path="$DB_PATH" \
  trainer.policy.model.path=Qwen/Qwen2.5-Coder-7B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.use_kl_loss=false \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.policy.optimizer_config.max_grad_norm=0.5 \
  trainer.epochs=30 \
  trainer.train_batch_size=256 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=2 \
  trainer.max_prompt_length=6000 \
  trainer.eval_before_train=false \
  trainer.eval_batch_size=256 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  generator.step_wise_trajectories=true \
  generator.merge_stepwise_output=true \
  generator.use_conversation_multi_turn=true \
  generator.n_samples_per_prompt=5 \
  generator.max_turns=6 \
  generator.max_input_length=29000 \
  generator.sampling_params.max_generate_length=3000 \
  generator.sampling_params.temperature=0.6 \
  generator.sampling_params.top_p=0.95 \
  generator.sampling_params.stop='["</sql>","</solution>"]' \
  generator.eval_sampling_params.stop='["</sql>","</solution>"]' \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=text2sql \
  trainer.run_name=text2sql_7b_step_wise \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
