#!/usr/bin/env bash
# GRPO on GSM8K one step off: completions of the next step are generated, with the weights of the step before, while this
# step trains. 4 GPUs train, 4 generate (NUM_TRAINER_GPUS, NUM_ENGINES).
# Data: uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
: "${DATA_DIR:=$HOME/data/gsm8k}" "${NUM_TRAINER_GPUS:=4}" "${INFERENCE_BACKEND:=native}"
NUM_NODES=1 NUM_GPUS="${NUM_ENGINES:-4}"
source "$(dirname "$0")/../common.sh"
PYTHONPATH="$here" "$PYTHON" -m main_async "${data[@]}" "${engines[@]}" \
  trainer.policy.model.path="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" trainer.policy.optimizer_config.lr=1e-6 \
  trainer.fully_async.enabled=true trainer.fully_async.max_staleness_steps=1 \
  trainer.fully_async.order=exact trainer.fully_async.pause=wait \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token \
  trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0 \
  trainer.algorithm.use_kl_loss=true trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node="$NUM_TRAINER_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_TRAINER_GPUS" \
  trainer.epochs=20 trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=8 \
  trainer.eval_batch_size=1024 trainer.eval_interval=5 \
  trainer.project_name=gsm8k trainer.run_name=gsm8k_one_step_off "$@"
