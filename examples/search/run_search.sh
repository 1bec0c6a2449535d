#!/usr/bin/env bash
# Question answering with a search engine, in up to four turns. GRPO with Qwen2.5-3B-Instruct, as in Search-R1.
#
#   python examples/search/searchr1_dataset.py --local_dir ~/data/searchR1
#   python -m skyrl_gym.tools.retrieval --corpus corpus.jsonl --index bm25          # in a terminal of its own: port 8000
#   bash examples/search/run_search.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

: "${DATA_DIR:=$HOME/data/searchR1}"
: "${NUM_GPUS:=8}"
: "${LOGGER:=console}"
: "${INFERENCE_BACKEND:=native}"
: "${SEARCH_URL:=http://127.0.0.1:8000/retrieve}"

"${PYTHON:-$root/.venv/bin/python}" -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=search \
  trainer.policy.model.path=Qwen/Qwen2.5-3B-Instruct \
  trainer.placement.device=cuda \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  trainer.strategy=fsdp2 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.policy.optimizer_config.lr=1e-6 \
  trainer.epochs=1 \
  trainer.train_batch_size=512 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=4 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.policy.optimizer_config.max_grad_norm=0.5 \
  trainer.policy.optimizer_config.num_warmup_steps=94 \
  trainer.algorithm.use_kl_loss=true \
  trainer.algorithm.kl_loss_coef=0.001 \
  trainer.max_prompt_length=2048 \
  trainer.eval_before_train=false \
  trainer.eval_batch_size=256 \
  trainer.eval_interval=50 \
  trainer.ckpt_interval=20 \
  trainer.max_ckpts_to_keep=5 \
  trainer.hf_save_interval=100 \
  environment.skyrl_gym.search.search_url="$SEARCH_URL" \
  environment.skyrl_gym.search.topk=3 \
  generator.n_samples_per_prompt=5 \
  generator.max_turns=4 \
  generator.max_input_length=4096 \
  generator.use_conversation_multi_turn=false \
  generator.sampling_params.max_generate_length=500 \
  generator.sampling_params.stop='["</search>","</answer>"]' \
  generator.eval_sampling_params.stop='["</search>","</answer>"]' \
  generator.eval_sampling_params.temperature=0 \
  trainer.resume_mode=null \
  trainer.logger="$LOGGER" \
  trainer.project_name=search \
  trainer.run_name=search_3b \
  generator.backend="$INFERENCE_BACKEND" \
  generator.num_inference_engines="$NUM_GPUS" \
  "$@"
