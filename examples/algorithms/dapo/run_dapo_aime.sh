#!/usr/bin/env bash
# DAPO on DAPO-Math-17k, evaluated on AIME 2024, on one machine with 8 GPUs.
#
#   python examples/aime/aime_dataset.py --output_dir ~/data/dapo
#   MODEL=Qwen/Qwen3-1.7B-Base bash examples/algorithms/dapo/run_dapo_aime.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/dapo}"
: "${MODEL:=Qwen/Qwen3-4B-Base}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"

# An answer may have 8,192 tokens; over the last 4,096 of them the penalty rises to 1.
"${PYTHON:-$root/.venv/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=aime \
  trainer.policy.model.path="$MODEL" \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.eps_clip_low=0.2 \
  trainer.algorithm.eps_clip_high=0.28 \
  trainer.algorithm.clip_ratio_c=10.0 \
  trainer.algorithm.loss_reduction=token_mean \
  trainer.algorithm.overlong_buffer.len=4096 \
  trainer.algorithm.overlong_buffer.penalty_factor=1.0 \
  trainer.algorithm.use_kl_loss=false \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.policy.optimizer_config.weight_decay=0.1 \
  trainer.policy.optimizer_config.max_grad_norm=1.0 \
  trainer.policy.optimizer_config.num_warmup_steps=160 \
  trainer.epochs=20 \
  trainer.train_batch_size=512 \
  trainer.policy_mini_batch_size=32 \
  trainer.max_tokens_per_microbatch=32768 \
  trainer.max_prompt_length=2048 \
  trainer.eval_interval=5 \
  trainer.eval_batch_size=1024 \
  trainer.ckpt_interval=10 \
  trainer.max_ckpts_to_keep=3 \
  trainer.hf_save_interval=10 \
  trainer.resume_mode=latest \
  trainer.logger="$LOGGER" \
  trainer.project_name=dapo \
  trainer.run_name=dapo_aime \
  generator.num_inference_engines="$NUM_GPUS" \
  generator.n_samples_per_prompt=16 \
  generator.eval_n_samples_per_prompt=32 \
  generator.apply_overlong_filtering=true \
  generator.sampling_params.max_generate_length=8192 \
  generator.sampling_params.temperature=1.0 \
  generator.sampling_params.top_p=1.0 \
  generator.eval_sampling_params.temperature=1.0 \
  generator.eval_sampling_params.top_p=0.7 \
  "$@"
