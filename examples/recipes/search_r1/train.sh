#!/usr/bin/env bash
# Trains $MODEL to search, with up to $MAX_TURNS turns: settings that the rows of the table share.
# FIGURES=later adds the truncated importance weights (cap 2) of the later script.
source "$(dirname "$0")/settings.sh"
correction=trainer.algorithm.off_policy_correction
case "${FIGURES:=table}" in
  table) weights=("$correction.tis_ratio_type=null") ;;
  later) weights=("$correction.tis_ratio_type=token" "$correction.token_tis_ratio_clip_high=2.0") ;;
  *) echo "FIGURES must be table or later; got $FIGURES" >&2 && exit 2 ;;
esac
train "${search[@]}" "${weights[@]}" trainer.policy.model.path="${MODEL:?set MODEL, or run one of the scripts run_*.sh}" \
  trainer.algorithm.advantage_estimator=grpo trainer.algorithm.use_kl_loss=true \
  trainer.algorithm.kl_loss_coef=0.001 trainer.algorithm.kl_estimator_type=k3 \
  trainer.policy.optimizer_config.lr=1e-6 trainer.policy.optimizer_config.max_grad_norm=0.5 \
  trainer.policy.optimizer_config.num_warmup_steps=94 generator.n_samples_per_prompt=5 \
  trainer.epochs=1 trainer.train_batch_size=512 trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=false trainer.eval_interval=50 trainer.ckpt_interval=20 trainer.max_ckpts_to_keep=5 \
  trainer.hf_save_interval=100 trainer.resume_mode=latest trainer.project_name=search_r1 \
  generator.sampling_params.temperature=1.0 generator.sampling_params.top_p=1.0 "$@"
