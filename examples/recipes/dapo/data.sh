#!/usr/bin/env bash
# DAPO-Math-17k, cleaned (about 17,000 problems of 1.79 million rows), and the 30 problems of AIME 2024.
# Prints rows and checksum of each file, and leaves them in prepared.json.
#
#   uv run bash examples/recipes/dapo/data.sh [--hub_train NAME@SPLIT#REVISION ...]
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
"$PYTHON" "$root/examples/aime/aime_dataset.py" --output_dir "$DATA_DIR" "$@"
