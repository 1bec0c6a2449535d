#!/usr/bin/env bash
# On-policy distillation: Qwen3-1.7B-Base learns from Qwen3-4B what to write where it goes itself. See docs/distillation.md.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/on_policy_distillation/run_distillation.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${STUDENT:=Qwen/Qwen3-1.7B-Base}"
: "${TEACHER:=Qwen/Qwen3-4B}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_distill \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path="$STUDENT" \
  trainer.distillation.teachers.main.model="$TEACHER" \
  trainer.distillation.tokens=sampled \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.policy.optimizer_config.lr=1e-5 \
  trainer.epochs=20 \
  trainer.train_batch_size=512 \
  trainer.policy_mini_batch_size=512 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.max_prompt_length=512 \
  trainer.eval_before_train=true \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  generator.sampling_params.max_generate_length=2048 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=on_policy_distillation \
  trainer.run_name=qwen3_1.7b_from_4b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
