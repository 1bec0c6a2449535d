#!/usr/bin/env bash
# The same run under DeepSpeed's stage 3, with parameters and optimizer in host memory.
#
#   uv run bash examples/recipes/skyrl_sql/run_qwen2.5_coder_7b_deepspeed.sh [key=value ...]
set -euo pipefail

bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen2.5_coder_7b.sh" \
  trainer.strategy=deepspeed \
  deepspeed_config.train.zero_optimization.stage=3 \
  deepspeed_config.train.zero_optimization.offload_param.device=cpu \
  deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu \
  deepspeed_config.train.zero_optimization.sub_group_size=1e4 \
  deepspeed_config.train.zero_optimization.reduce_bucket_size=1e4 \
  deepspeed_config.train.zero_optimization.stage3_param_persistence_threshold=1e2 \
  deepspeed_config.train.disable_trace_cache=true \
  trainer.run_name=skyrl_sql_7b_deepspeed \
  "$@"
