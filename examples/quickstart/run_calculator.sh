#!/usr/bin/env bash
# Two turns: the model may call a calculator, reads its result, and answers. GRPO on 0.15 million parameters.
# `python examples/quickstart/run.py --task calculator` makes the model and the data, and then runs this.
#
#   MODEL=folder DATA_DIR=folder [RUN_DIR=folder] bash examples/quickstart/run_calculator.sh [key=value ...]
#
# The settings are run_arithmetic.sh's but for these:
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

RUN_DIR="${RUN_DIR:-$root/runs/quickstart-calculator}" bash "$root/examples/quickstart/run_arithmetic.sh" \
  environment.env_class=calculator \
  trainer.run_name=calculator \
  trainer.max_training_steps=40 \
  trainer.train_batch_size=16 \
  trainer.policy_mini_batch_size=8 \
  trainer.micro_forward_batch_size_per_gpu=32 \
  trainer.micro_train_batch_size_per_gpu=32 \
  trainer.policy.optimizer_config.lr=1e-4 \
  trainer.hf_save_interval=40 \
  generator.max_turns=2 \
  generator.max_input_length=96 \
  "$@"
