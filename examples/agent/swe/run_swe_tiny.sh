#!/usr/bin/env bash
# SA-SWE without a GPU or containers: programs that carry their own tests, and a tiny local model. It shows that
# sandboxes, tests and trainer work together, not that such a model fixes programs. MODEL is the folder of the model.
# Data: uv run examples/agent/swe/swe_dataset.py --output_dir ~/data/agent_swe
: "${MODEL:?set MODEL to the folder of a tiny causal language model}" "${DATA_DIR:=$HOME/data/agent_swe}"
source "$(dirname "$0")/../../common.sh"
"$PYTHON" -m skyrl_train.entrypoints.main_base "${data[@]}" \
  generator.task="$here/swe_tiny.yaml" environment.env_class=null generator.n_samples_per_prompt=2 \
  trainer.policy.model.path="$MODEL" trainer.placement.device=cpu trainer.bf16=false generator.model_dtype=float32 \
  trainer.algorithm.use_kl_loss=false trainer.max_training_steps=2 trainer.max_prompt_length=4096 \
  trainer.train_batch_size=2 trainer.policy_mini_batch_size=2 \
  trainer.micro_forward_batch_size_per_gpu=4 trainer.micro_train_batch_size_per_gpu=4 \
  trainer.eval_before_train=false trainer.eval_interval=-1 trainer.ckpt_interval=-1 \
  trainer.logger="$LOGGER" trainer.project_name=agent trainer.run_name=swe_tiny "$@"
