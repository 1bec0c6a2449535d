#!/usr/bin/env bash
# GRPO on GSM8K one step off: the prompts of the next step are answered, with the weights of one step before, while this
# step trains. 4 GPUs train, 4 generate.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/async/run_async_gsm8k.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${MODEL:=Qwen/Qwen2.5-1.5B-Instruct}"
: "${DEVICE:=cuda}"
: "${NUM_TRAINER_GPUS:=4}"
: "${NUM_ENGINES:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

PYTHONPATH="$root/examples/async" "${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m main_async \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.fully_async.enabled=true \
  trainer.fully_async.max_staleness_steps=1 \
  trainer.fully_async.order=exact \
  trainer.fully_async.pause=wait \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token \
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 \
  trainer.policy.model.path="$MODEL" \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.placement.device="$DEVICE" \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node="$NUM_TRAINER_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_TRAINER_GPUS" \
  trainer.epochs=20 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_one_step_off \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_ENGINES" \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  "$@"
