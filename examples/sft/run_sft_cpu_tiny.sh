#!/usr/bin/env bash
# Supervised training without a GPU: a tiny local model (MODEL is its folder) with a chat template, on two CPU processes.
# Data: uv run examples/sft/gsm8k_demonstrations.py --output_dir ~/data/gsm8k_sft
: "${MODEL:?set MODEL to the folder of a tiny causal language model}" "${DATA_DIR:=$HOME/data/gsm8k_sft}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_sft "${data[@]}" data.max_length=512 \
  trainer.policy.model.path="$MODEL" trainer.policy.optimizer_config.lr=1e-3 trainer.bf16=false \
  trainer.placement.device=cpu trainer.placement.policy_num_gpus_per_node=2 \
  trainer.max_training_steps=10 trainer.train_batch_size=16 trainer.max_tokens_per_microbatch=2048 \
  trainer.eval_interval=-1 trainer.ckpt_interval=5 \
  trainer.logger="$LOGGER" trainer.project_name=sft trainer.run_name=gsm8k_sft_cpu_tiny "$@"
