#!/usr/bin/env bash
# The same without a GPU or containers: programs that carry their own tests, and a tiny local model. It shows that
# sandboxes, tests and trainer work together, not that such a model mends programs.
#
#   uv run examples/agent/swe/swe_dataset.py --output_dir ~/data/agent_swe
#   MODEL=path/to/a/tiny/model bash examples/agent/swe/run_swe_tiny.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${MODEL:?set MODEL to the folder of a tiny causal language model}"
: "${DATA_DIR:=$HOME/data/agent_swe}"
: "${LOGGER:=console}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  generator.task="$root/examples/agent/swe/swe_tiny.yaml" \
  generator.n_samples_per_prompt=2 \
  environment.env_class=null \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path="$MODEL" \
  trainer.placement.device=cpu \
  trainer.strategy=fsdp2 \
  trainer.bf16=false \
  trainer.algorithm.use_kl_loss=false \
  trainer.max_training_steps=2 \
  trainer.train_batch_size=2 \
  trainer.policy_mini_batch_size=2 \
  trainer.micro_forward_batch_size_per_gpu=4 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.max_prompt_length=4096 \
  trainer.eval_before_train=false \
  trainer.eval_interval=-1 \
  trainer.ckpt_interval=-1 \
  trainer.logger="$LOGGER" \
  trainer.project_name=agent \
  trainer.run_name=swe_tiny \
  generator.num_inference_engines=1 \
  generator.model_dtype=float32 \
  "$@"
