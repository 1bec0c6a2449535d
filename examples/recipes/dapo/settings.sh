# Sourced by the scripts of this folder: settings that training and evaluation share.
: "${DATA_DIR:=$HOME/data/dapo}" "${INFERENCE_BACKEND:=vllm}" "${ENGINE_MEMORY:=0.8}"
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
aime=(environment.env_class=aime trainer.max_prompt_length=2048 trainer.eval_batch_size=1024
  generator.sampling_params.max_generate_length=8192 generator.eval_n_samples_per_prompt=32
  generator.eval_sampling_params.temperature=1.0 generator.eval_sampling_params.top_p=0.7)
