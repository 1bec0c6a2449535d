#!/usr/bin/env bash
# Two turns: the model may call a calculator, reads its result, and responds. GRPO on 0.15 million parameters.
# `python examples/quickstart/run.py --task calculator` creates the model and the data, and then runs this script, with the
# settings of run_arithmetic.sh except these:
source "$(dirname "$0")/../common.sh"
RUN_DIR="${RUN_DIR:-$root/runs/quickstart-calculator}" exec bash "$here/run_arithmetic.sh" \
  environment.env_class=calculator trainer.run_name=calculator \
  trainer.max_training_steps=40 trainer.hf_save_interval=40 trainer.train_batch_size=16 trainer.policy_mini_batch_size=8 \
  trainer.micro_forward_batch_size_per_gpu=32 trainer.micro_train_batch_size_per_gpu=32 \
  trainer.policy.optimizer_config.lr=1e-4 generator.max_turns=2 generator.max_input_length=96 "$@"
