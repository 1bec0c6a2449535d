#!/usr/bin/env bash
# The training loop without a GPU: a tiny local model (MODEL is its folder) on two CPU worker processes and one engine. It
# shows that everything works together, not that such a model learns arithmetic.
# Data: uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
: "${MODEL:?set MODEL to the folder of a tiny causal language model}" "${DATA_DIR:=$HOME/data/gsm8k}"
source "$(dirname "$0")/../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_base "${data[@]}" \
  trainer.policy.model.path="$MODEL" trainer.bf16=false generator.model_dtype=float32 \
  trainer.placement.device=cpu trainer.placement.policy_num_gpus_per_node=2 \
  trainer.max_training_steps=3 trainer.train_batch_size=8 trainer.policy_mini_batch_size=4 \
  trainer.micro_forward_batch_size_per_gpu=8 trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=false trainer.eval_interval=-1 trainer.ckpt_interval=1 \
  trainer.max_prompt_length=256 generator.sampling_params.max_generate_length=64 generator.n_samples_per_prompt=4 \
  trainer.logger="$LOGGER" trainer.project_name=gsm8k trainer.run_name=gsm8k_cpu_tiny "$@"
