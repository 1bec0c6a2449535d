# Sourced by the scripts beside it: what training and evaluation share.
: "${INFERENCE_BACKEND:=native}"
: "${NUM_GPUS:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA_DIR:=$HOME/data/gsm8k}"

gsm8k=(
  data.val_data="['$DATA_DIR/validation.parquet']"
  environment.env_class=gsm8k
  trainer.max_prompt_length=512
  trainer.eval_batch_size=1024
  generator.sampling_params.max_generate_length=1024
)
