#!/usr/bin/env bash
# The run of run_megatron.sh with FSDP2, to compare with.
exec bash "$(dirname "$0")/run_megatron.sh" trainer.strategy=fsdp2 trainer.run_name=qwen3_0.6b_fsdp2 "$@"
