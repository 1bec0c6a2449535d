#!/usr/bin/env bash
# An agent that resolves issues in R2E-Gym's images: leave-one-out advantages with Qwen3-32B, as in SA-SWE-32B.
#
#   python examples/agent/data/swe_data.py --output_dir ~/data/agent_swe_bench
#   bash examples/agent/swe/run_swe_agent.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)"

: "${DATA_DIR:=$HOME/data/agent_swe_bench}"
: "${NUM_NODES:=2}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"

"${PYTHON:-$root/.venv/bin/python}" -m skyrl_train.entrypoints.main_base \
  generator.task="$root/examples/agent/swe/swe_bench.yaml" \
  generator.n_samples_per_prompt=8 \
  environment.env_class=null \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.policy.model.path=Qwen/Qwen3-32B \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_nodes="$NUM_NODES" \
  trainer.placement.ref_num_nodes="$NUM_NODES" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=rloo \
  trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.loss_reduction=seq_mean_token_sum_norm \
  trainer.algorithm.grpo_norm_by_std=false \
  trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.eps_clip_low=0.2 \
  trainer.algorithm.eps_clip_high=0.28 \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=3 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=64 \
  trainer.micro_forward_batch_size_per_gpu=1 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.max_prompt_length=8000 \
  trainer.eval_interval=8 \
  trainer.ckpt_interval=2 \
  trainer.dump_data_batch=true \
  trainer.logger="$LOGGER" \
  trainer.project_name=agent \
  trainer.run_name=swe \
  generator.num_inference_engines=4 \
  generator.inference_engine_tensor_parallel_size=4 \
  "$@"
