#!/usr/bin/env bash
# A shell script with curl learns to repair programs: GRPO on a model of 0.1 million parameters, without a GPU.
# `python examples/harness/repair.py` creates the model and the data, and then runs this script.
: "${MODEL:?set MODEL to the folder of a model}" "${DATA_DIR:?set DATA_DIR to the folder of train.jsonl}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.jsonl']" data.val_data="[]" environment.env_class=null \
  trainer.policy.model.path="$MODEL" trainer.bf16=false generator.model_dtype=float32 generator.served_model_name=tiny \
  trainer.run_dir="${RUN_DIR:-$root/runs/harness-shell}" trainer.project_name=harness trainer.run_name=shell \
  trainer.placement.device=cpu trainer.placement.launcher=inline trainer.gradient_checkpointing=false \
  trainer.epochs=1000 trainer.max_training_steps=10 trainer.train_batch_size=4 trainer.policy_mini_batch_size=4 \
  trainer.micro_forward_batch_size_per_gpu=16 trainer.micro_train_batch_size_per_gpu=16 \
  trainer.policy.optimizer_config.lr=1e-3 trainer.algorithm.use_kl_loss=false \
  trainer.eval_interval=-1 trainer.ckpt_interval=-1 trainer.hf_save_interval=-1 \
  trainer.max_prompt_length=128 generator.n_samples_per_prompt=6 generator.sampling_params.max_generate_length=16 \
  'generator.harness.command=["sh","'"$here"'/shell_agent.sh"]' 'generator.harness.visible=["'"$here"'"]' \
  generator.harness.deadline_seconds=60 generator.harness.max_turns=4 generator.harness.max_parallel=4 "$@"
