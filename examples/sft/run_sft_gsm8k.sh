#!/usr/bin/env bash
# Supervised training of Qwen2.5-1.5B on GSM8K's solutions, on one machine with 4 GPUs.
# Data: uv run examples/sft/gsm8k_demonstrations.py --output_dir ~/data/gsm8k_sft
: "${DATA_DIR:=$HOME/data/gsm8k_sft}" "${NUM_GPUS:=4}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_sft "${data[@]}" data.max_length=2048 \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.policy.optimizer_config.lr=1e-5 trainer.policy.optimizer_config.num_warmup_steps=10 \
  trainer.placement.device="$DEVICE" trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.epochs=3 trainer.train_batch_size=64 trainer.max_tokens_per_microbatch=8192 \
  trainer.eval_interval=50 trainer.ckpt_interval=100 trainer.hf_save_interval=1000 \
  trainer.logger="$LOGGER" trainer.project_name=sft trainer.run_name=gsm8k_sft_qwen2.5_1.5b "$@"
