# Sourced by the scripts of this folder: settings that training and evaluation share.
: "${DATA_DIR:=$HOME/data/gsm8k}" "${INFERENCE_BACKEND:=native}" "${NUM_GPUS:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
gsm8k=(environment.env_class=gsm8k trainer.max_prompt_length=512 trainer.eval_batch_size=1024
  generator.sampling_params.max_generate_length=1024)
