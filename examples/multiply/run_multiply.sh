#!/usr/bin/env bash
# Multiplication, in up to five turns: an answer that is wrong may be tried again. GRPO with Qwen2.5-1.5B-Instruct.
#
#   uv run examples/multiply/multiply_dataset.py --output_dir ~/data/multiply --num_digits 4
#   uv run bash examples/multiply/run_multiply.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/multiply}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=multiply \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 \
  trainer.train_batch_size=512 \
  trainer.policy_mini_batch_size=128 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.algorithm.use_kl_loss=true \
  trainer.max_prompt_length=512 \
  trainer.eval_before_train=true \
  trainer.eval_batch_size=200 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  generator.n_samples_per_prompt=5 \
  generator.max_turns=5 \
  generator.max_input_length=4096 \
  generator.sampling_params.max_generate_length=1024 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=multiply \
  trainer.run_name=multiply_1.5b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
