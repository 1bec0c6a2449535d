#!/usr/bin/env bash
# An advantage estimator of one's own on GSM8K, on one machine with 4 GPUs.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/algorithms/custom_advantage_estimator/run_custom_advantage_estimator.sh [key=value ...]
set -euo pipefail
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$folder/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"

export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m main_custom_advantage_estimator \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.algorithm.advantage_estimator=simple_baseline \
  trainer.algorithm.use_kl_loss=false \
  trainer.placement.device=cuda \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.max_tokens_per_microbatch=16384 \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_1.5b_custom_advantage_estimator \
  generator.num_inference_engines="$NUM_GPUS" \
  generator.n_samples_per_prompt=5 \
  "$@"
