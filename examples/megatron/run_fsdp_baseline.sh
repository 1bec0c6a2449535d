#!/usr/bin/env bash
# The run of run_megatron.sh with FSDP2, to compare with.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir ~/data/gsm8k
#   uv run bash examples/megatron/run_fsdp_baseline.sh [key=value ...]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

exec bash "$root/examples/megatron/run_megatron.sh" \
  trainer.strategy=fsdp2 \
  trainer.run_name=qwen3_0.6b_fsdp2 \
  "$@"
