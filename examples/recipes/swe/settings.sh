# Sourced by the scripts beside it: where the tasks are.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
swe="$recipes/swe"
: "${DATA_DIR:=$HOME/data/agent_swe_bench}"
