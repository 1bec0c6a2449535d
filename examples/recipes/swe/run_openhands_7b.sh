#!/usr/bin/env bash
# OpenHands-7B-Agent, v0: 15 steps on the first set of tasks, then 25 on the second (run it again with the other DATA_DIR
# and trainer.max_training_steps=40: it resumes from its checkpoint).
MODEL="${MODEL:-all-hands/openhands-lm-7b-v0.1}" TASK=openhands_7b.yaml exec bash "$(dirname "$0")/v0.sh" \
  trainer.train_batch_size=16 trainer.policy_mini_batch_size=16 trainer.max_training_steps=15 \
  generator.n_samples_per_prompt=16 generator.sampling_params.temperature=0.5 \
  generator.sampling_params.top_p=0.95 trainer.run_name=swe_openhands_7b "$@"
