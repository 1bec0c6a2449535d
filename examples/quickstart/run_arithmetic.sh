#!/usr/bin/env bash
# Two-digit addition, one turn. GRPO on a Qwen3-architecture model of 0.1 million parameters, two CPU processes and one engine.
# `python examples/quickstart/run.py --task arithmetic` creates the model and the data, and then runs this script.
: "${MODEL:?set MODEL to the folder that warm_up.py wrote}" "${DATA_DIR:?set DATA_DIR to the folder that data.py wrote}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_base "${data[@]}" \
  environment.env_class=arithmetic trainer.policy.model.path="$MODEL" trainer.bf16=false generator.model_dtype=float32 \
  trainer.run_dir="${RUN_DIR:-$root/runs/quickstart-arithmetic}" trainer.logger="$LOGGER" \
  trainer.project_name=quickstart trainer.run_name=arithmetic \
  trainer.placement.policy_num_gpus_per_node=2 trainer.gradient_checkpointing=false \
  trainer.epochs=1000 trainer.max_training_steps=50 trainer.train_batch_size=32 trainer.policy_mini_batch_size=16 \
  trainer.micro_forward_batch_size_per_gpu=64 trainer.micro_train_batch_size_per_gpu=64 \
  trainer.policy.optimizer_config.lr=2e-4 trainer.policy.optimizer_config.num_warmup_steps=5 \
  trainer.algorithm.use_kl_loss=false trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 \
  trainer.eval_interval=2 trainer.ckpt_interval=10 trainer.max_ckpts_to_keep=2 trainer.hf_save_interval=50 \
  trainer.max_prompt_length=32 generator.max_input_length=32 generator.n_samples_per_prompt=8 generator.max_turns=1 \
  generator.sampling_params.max_generate_length=32 generator.sampling_params.temperature=1.0 "$@"
