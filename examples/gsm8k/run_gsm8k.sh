#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct, on one machine with 4 GPUs.
#
#   python examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   bash examples/gsm8k/run_gsm8k.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS:=4}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

# The micro-batch sizes change memory and speed, not the result: these suit 80 GB and a vocabulary of 150,000 words.
"${PYTHON:-$root/.venv/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.update_epochs_per_batch=1 \
  trainer.max_prompt_length=512 \
  trainer.eval_before_train=true \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_1.5b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  "$@"
