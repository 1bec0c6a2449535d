#!/usr/bin/env bash
# Qwen3-32B, SA-SWE: leave-one-out advantages on two machines with 8 GPUs, every sequence over 4 ranks.
export MODEL="${MODEL:-Qwen/Qwen3-32B}" TASK=qwen3_32b.yaml
export NUM_NODES="${NUM_NODES:-2}" TENSOR_PARALLEL="${TENSOR_PARALLEL:-4}"
exec bash "$(dirname "$0")/train.sh" \
  trainer.algorithm.advantage_estimator=rloo trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=40768 \
  trainer.algorithm.grpo_norm_by_std=false trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 \
  trainer.policy.sequence_parallel_size=4 trainer.ref.sequence_parallel_size=4 \
  trainer.epochs=10 trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 generator.n_samples_per_prompt=8 \
  trainer.max_prompt_length=8000 generator.sampling_params.max_generate_length=32768 \
  generator.sampling_params.temperature=1.0 generator.sampling_params.top_p=1.0 trainer.run_name=swe_qwen3_32b "$@"
