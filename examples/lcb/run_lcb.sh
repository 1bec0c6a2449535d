#!/usr/bin/env bash
# Competitive programming, graded by tests in a sandbox. GRPO with Qwen2.5-3B-Instruct.
#
#   uv run examples/lcb/lcb_dataset.py --output_dir ~/data/lcb
#   uv run bash examples/lcb/run_lcb.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/lcb}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=lcb \
  trainer.policy.model.path=Qwen/Qwen2.5-3B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=10 \
  trainer.train_batch_size=16 \
  trainer.policy_mini_batch_size=4 \
  trainer.micro_forward_batch_size_per_gpu=1 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.algorithm.use_kl_loss=true \
  trainer.max_prompt_length=29000 \
  trainer.eval_before_train=false \
  trainer.eval_batch_size=64 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=3000 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=lcb \
  trainer.run_name=lcb_3b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
