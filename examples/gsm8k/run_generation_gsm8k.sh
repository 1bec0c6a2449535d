#!/usr/bin/env bash
# Answers and grades the validation problems of GSM8K with Qwen2.5-0.5B-Instruct on one GPU. Nothing is trained.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/gsm8k/run_generation_gsm8k.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS:=1}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_generate \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.placement.device=cuda \
  trainer.max_prompt_length=512 \
  trainer.eval_batch_size=1024 \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_generation \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  generator.eval_sampling_params.max_generate_length=1024 \
  generator.eval_sampling_params.temperature=0.7 \
  "$@"
