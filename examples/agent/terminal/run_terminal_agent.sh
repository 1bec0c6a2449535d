#!/usr/bin/env bash
# An agent at a shell: GRPO with Qwen3-4B-Instruct.
#
#   uv run examples/agent/terminal/terminal_dataset.py --output_dir ~/data/agent_terminal
#   uv run bash examples/agent/terminal/run_terminal_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_terminal}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  generator.task="$root/examples/agent/terminal/terminal.yaml" \
  generator.n_samples_per_prompt=8 \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen3-4B-Instruct-2507 \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=false \
  trainer.policy.optimizer_config.lr=2e-6 \
  trainer.epochs=1 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=4 \
  trainer.micro_train_batch_size_per_gpu=2 \
  trainer.max_prompt_length=2048 \
  trainer.eval_batch_size=64 \
  trainer.eval_interval=20 \
  trainer.ckpt_interval=20 \
  trainer.logger="$LOGGER" \
  trainer.project_name=agent \
  trainer.run_name=terminal \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
