#!/usr/bin/env bash
# GSM8K: 7,473 problems to train on, 1,319 to evaluate on. Options of the builder may follow: --input FILES ...
source "$(dirname "$0")/settings.sh"
"$PYTHON" "$root/examples/gsm8k/gsm8k_dataset.py" --output_dir "$DATA_DIR" "$@"
