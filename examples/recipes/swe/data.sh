#!/usr/bin/env bash
# Tasks of R2E-Gym to train on (about 4,500) and SWE-bench Verified (500) to evaluate on. The runs of v0 train on other
# sets: --hub_train NovaSky-AI/SkyRL-v0-80-data@train for the first stage of the 7B, SkyRL-v0-220-data for its second,
# SkyRL-v0-293-data for the 8B and the 14B.
source "$(dirname "$0")/settings.sh"
"$PYTHON" "$root/examples/agent/data/swe_data.py" --output_dir "$DATA_DIR" "$@"
