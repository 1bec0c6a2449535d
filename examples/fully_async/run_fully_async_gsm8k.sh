#!/usr/bin/env bash
# GRPO on GSM8K, fully asynchronous: groups are generated while the trainer computes, and none is trained whose tokens are
# more than 4 steps old. 2 GPUs train, 2 generate (NUM_TRAINER_GPUS, NUM_ENGINES).
# Data: uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
: "${DATA_DIR:=$HOME/data/gsm8k}" "${INFERENCE_BACKEND:=native}"
NUM_NODES=1 NUM_GPUS="${NUM_ENGINES:-2}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_base "${data[@]}" "${engines[@]}" \
  trainer.policy.model.path="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" trainer.policy.optimizer_config.lr=1e-6 \
  trainer.fully_async.enabled=true trainer.fully_async.max_staleness_steps=4 \
  trainer.fully_async.num_parallel_generation_workers=1280 \
  trainer.algorithm.use_kl_loss=false trainer.algorithm.policy_loss_type=decoupled_ppo \
  trainer.placement.colocate_all=false trainer.placement.policy_num_gpus_per_node="${NUM_TRAINER_GPUS:-2}" \
  trainer.epochs=20 trainer.train_batch_size=256 trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=8 \
  trainer.eval_batch_size=1024 trainer.eval_interval=4 \
  trainer.project_name=gsm8k trainer.run_name=gsm8k_fully_async "$@"
