#!/usr/bin/env bash
# GSM8K in up to five turns, with a reward in every turn: a small one for a well-formed answer, 1 for the right one. The
# advantage of a turn is what was earned from it on, compared with the same turn of the prompt's other samples
# (advantage_estimator=turn_grpo); gamma discounts a reward for each later turn. Qwen2.5-0.5B-Instruct on one GPU.
#
#   uv run examples/gsm8k_multi_turn/gsm8k_multi_turn_dataset.py --output_dir ~/data/gsm8k_multi_turn
#   uv run bash examples/turn_level_rewards/run_gsm8k_multi_turn.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/gsm8k_multi_turn}"
: "${NUM_GPUS:=1}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k_multi_turn \
  trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=turn_grpo \
  trainer.algorithm.gamma=1.0 \
  trainer.algorithm.use_kl_loss=true \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=20 \
  trainer.train_batch_size=256 \
  trainer.policy_mini_batch_size=128 \
  trainer.micro_forward_batch_size_per_gpu=16 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.max_prompt_length=512 \
  trainer.eval_before_train=true \
  trainer.eval_batch_size=1024 \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  generator.n_samples_per_prompt=5 \
  generator.max_turns=5 \
  generator.max_input_length=4096 \
  generator.sampling_params.max_generate_length=1024 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=gsm8k \
  trainer.run_name=gsm8k_multi_turn_0.5b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
