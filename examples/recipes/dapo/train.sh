#!/usr/bin/env bash
# Trains $MODEL by DAPO: settings that the rows of the table share. The scripts run_*.sh set the model and the $RECIPE_ROW, which
# names the run and its expected curve.
#
# FIGURES=table   the settings of the first table: the overlong penalty counts prompt and response (it begins at response
#                 token 5,994 of a prompt of 150), and a response without the end token does not train
# FIGURES=later   of later figures: the penalty counts the response (from token 4,096 on), and the stop reason decides
source "$(dirname "$0")/settings.sh"
case "${FIGURES:=table}" in
  table) cut_off=(trainer.algorithm.overlong_buffer.counts=context generator.overlong_filtering_by=end_token) ;;
  later) cut_off=(trainer.algorithm.overlong_buffer.counts=response generator.overlong_filtering_by=stop_reason) ;;
  *) echo "FIGURES must be table or later; got $FIGURES" >&2 && exit 2 ;;
esac
train "${aime[@]}" "${cut_off[@]}" trainer.policy.model.path="${MODEL:?set MODEL, or run one of the scripts run_*.sh}" \
  trainer.algorithm.advantage_estimator=grpo trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 trainer.algorithm.clip_ratio_c=10.0 \
  trainer.algorithm.loss_reduction=token_mean trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.overlong_buffer.len=4096 trainer.algorithm.overlong_buffer.penalty_factor=1.0 \
  trainer.policy.optimizer_config.lr=1e-6 trainer.policy.optimizer_config.weight_decay=0.1 \
  trainer.policy.optimizer_config.max_grad_norm=1.0 trainer.policy.optimizer_config.num_warmup_steps=160 \
  trainer.epochs=20 trainer.train_batch_size=512 trainer.policy_mini_batch_size=32 generator.n_samples_per_prompt=16 \
  trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=true trainer.eval_interval=5 trainer.ckpt_interval=10 trainer.max_ckpts_to_keep=3 \
  trainer.hf_save_interval=10 trainer.resume_mode=latest trainer.project_name=dapo \
  generator.sampling_params.temperature=1.0 generator.sampling_params.top_p=1.0 \
  generator.apply_overlong_filtering=true generator.enforce_eager=true \
  ${RECIPE_ROW:+trainer.run_name="dapo_$RECIPE_ROW" trainer.curve_bands="$here/bands/$RECIPE_ROW.yaml"} "$@"
