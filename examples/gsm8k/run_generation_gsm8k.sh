#!/usr/bin/env bash
# Evaluates Qwen2.5-0.5B-Instruct on the validation problems of GSM8K on one GPU, without training.
# Data: uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
: "${DATA_DIR:=$HOME/data/gsm8k}" "${NUM_GPUS:=1}" "${INFERENCE_BACKEND:=native}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_generate "${engines[@]}" \
  data.val_data="['$DATA_DIR/validation.parquet']" trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.eval_batch_size=1024 generator.eval_sampling_params.max_generate_length=1024 \
  generator.eval_sampling_params.temperature=0.7 trainer.project_name=gsm8k trainer.run_name=gsm8k_generation "$@"
