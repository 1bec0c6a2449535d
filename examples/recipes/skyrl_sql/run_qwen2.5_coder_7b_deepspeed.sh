#!/usr/bin/env bash
# The run of run_qwen2.5_coder_7b.sh under DeepSpeed's stage 3, with parameters and optimizer in host memory.
exec bash "$(dirname "$0")/run_qwen2.5_coder_7b.sh" trainer.run_name=skyrl_sql_7b_deepspeed \
  trainer.strategy=deepspeed deepspeed_config.train.zero_optimization.stage=3 \
  deepspeed_config.train.zero_optimization.offload_{param,optimizer}.device=cpu \
  deepspeed_config.train.zero_optimization.{sub_group_size,reduce_bucket_size}=1e4 \
  deepspeed_config.train.zero_optimization.stage3_param_persistence_threshold=1e2 \
  deepspeed_config.train.disable_trace_cache=true "$@"
