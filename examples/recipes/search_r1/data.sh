#!/usr/bin/env bash
# Questions of NQ and HotpotQA to train on (about 170,000) and the seven sets to evaluate on, with the prompts of the
# data's own column. Options of the builder may follow: --hub_train NAME@SPLIT#REVISION ...
source "$(dirname "$0")/settings.sh"
"$PYTHON" "$root/examples/search/searchr1_dataset.py" --output_dir "$DATA_DIR" "$@"
