#!/usr/bin/env bash
# An agent that reads long texts section by section: GRPO with Qwen3-8B, as in MemAgent.
#
#   uv run examples/agent/data/memagent.py --output_dir ~/data/agent_memory --num_documents 200
#   uv run bash examples/agent/memory/run_memory_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_memory}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"

"${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}" -m skyrl_train.entrypoints.main_base \
  generator.task="$root/examples/agent/memory/memory.yaml" \
  generator.n_samples_per_prompt=8 \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen3-8B \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=false \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=1 \
  trainer.train_batch_size=32 \
  trainer.policy_mini_batch_size=32 \
  trainer.micro_forward_batch_size_per_gpu=2 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.max_prompt_length=8192 \
  trainer.eval_batch_size=128 \
  trainer.eval_interval=10 \
  trainer.ckpt_interval=10 \
  trainer.logger="$LOGGER" \
  trainer.project_name=agent \
  trainer.run_name=memory \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
