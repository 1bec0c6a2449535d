#!/usr/bin/env bash
# The same loop without a GPU: a tiny local model on two CPU worker processes and one engine. It shows that everything
# works together, not that such a model learns arithmetic.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   MODEL=path/to/a/tiny/model bash examples/gsm8k/run_gsm8k_cpu_tiny.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${MODEL:?set MODEL to the folder of a tiny causal language model}"
: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${LOGGER:=console}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path="$MODEL" \
  trainer.placement.device=cpu \
  trainer.placement.policy_num_gpus_per_node=2 \
  trainer.strategy=fsdp2 \
  trainer.bf16=false \
  trainer.max_training_steps=3 \
  trainer.train_batch_size=8 \
  trainer.policy_mini_batch_size=4 \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.max_prompt_length=256 \
  trainer.eval_before_train=false \
  trainer.eval_interval=-1 \
  trainer.ckpt_interval=1 \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_cpu_tiny \
  generator.num_inference_engines=1 \
  generator.model_dtype=float32 \
  generator.n_samples_per_prompt=4 \
  generator.sampling_params.max_generate_length=64 \
  "$@"
