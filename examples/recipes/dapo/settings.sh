# Sourced by the scripts beside it: what training and evaluation share.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
: "${DATA_DIR:=$HOME/data/dapo}"

aime=(
  data.val_data="['$DATA_DIR/validation.parquet']"
  environment.env_class=aime
  trainer.max_prompt_length=2048
  trainer.eval_batch_size=1024
  generator.eval_n_samples_per_prompt=32
  generator.sampling_params.max_generate_length=8192
  generator.eval_sampling_params.temperature=1.0
  generator.eval_sampling_params.top_p=0.7
)
