#!/usr/bin/env bash
# Questions of NQ and HotpotQA to train on (about 170,000) and the seven sets to evaluate on, in the words of the
# data's own prompt column.
#
#   uv run bash examples/recipes/search_r1/data.sh [--hub_train NAME@SPLIT#REVISION ...]
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
"$PYTHON" "$root/examples/search/searchr1_dataset.py" --output_dir "$DATA_DIR" "$@"
