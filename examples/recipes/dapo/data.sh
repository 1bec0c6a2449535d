#!/usr/bin/env bash
# DAPO-Math-17k, cleaned (about 17,000 problems of 1.79 million rows), and the 30 problems of AIME 2024. Prints rows and
# checksum of each file, and writes them to prepared.json. Options of the builder may follow: --hub_train NAME@SPLIT#REVISION
source "$(dirname "$0")/settings.sh"
"$PYTHON" "$root/examples/aime/aime_dataset.py" --output_dir "$DATA_DIR" "$@"
