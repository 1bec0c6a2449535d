#!/usr/bin/env bash
# DPO of Qwen2.5-1.5B-Instruct on preference pairs, on one machine with 4 GPUs. The rows have `prompt`, `chosen` and
# `rejected`, each a text or messages.
: "${TRAIN_DATA:=trl-lib/ultrafeedback_binarized:train}" "${VAL_DATA:=trl-lib/ultrafeedback_binarized:test}"
: "${NUM_GPUS:=4}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_dpo \
  data.train_data="['$TRAIN_DATA']" data.val_data="['$VAL_DATA']" data.max_length=2048 \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct trainer.algorithm.dpo.beta=0.1 \
  trainer.policy.optimizer_config.lr=5e-7 trainer.policy.optimizer_config.num_warmup_steps=50 \
  trainer.placement.device="$DEVICE" trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.epochs=1 trainer.train_batch_size=64 trainer.max_tokens_per_microbatch=8192 \
  trainer.eval_interval=100 trainer.ckpt_interval=200 trainer.hf_save_interval=1000 \
  trainer.logger="$LOGGER" trainer.project_name=dpo trainer.run_name=dpo_qwen2.5_1.5b "$@"
