#!/usr/bin/env bash
# Questions to databases, in up to six turns: the model tries queries before it settles. GRPO with
# Qwen2.5-Coder-7B-Instruct, as in SkyRL-SQL. DB_PATH is the folder with the databases, such as
# spider/database/ID/ID.sqlite below it.
#
#   python examples/text2sql/text2sql_dataset.py --output_dir ~/data/sql --db_path ~/data/sql/db_files/data
#   bash examples/text2sql/run_text2sql.sh [key=value ...]
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
  trainer.policy.model.path=Qwen/Qwen2.5-Coder-7B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=30 \
  trainer.train_batch_size=256 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.policy.optimizer_config.max_grad_norm=0.5 \
  trainer.algorithm.use_kl_loss=false \
  trainer.max_prompt_length=6000 \
  trainer.eval_before_train=false \
  trainer.eval_batch_size=256 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  environment.skyrl_gym.text2sql.db_path="$DB_PATH" \
  generator.n_samples_per_prompt=5 \
  generator.max_turns=6 \
  generator.max_input_length=29000 \
  generator.use_conversation_multi_turn=false \
  generator.sampling_params.max_generate_length=3000 \
  generator.sampling_params.temperature=0.6 \
  generator.sampling_params.top_p=0.95 \
  generator.sampling_params.stop='["</sql>","</solution>"]' \
  generator.eval_sampling_params.stop='["</sql>","</solution>"]' \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=text2sql \
  trainer.run_name=text2sql_7b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
