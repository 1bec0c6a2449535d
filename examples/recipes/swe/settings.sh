# Sourced by the scripts of this folder: location of the tasks, engines.
: "${DATA_DIR:=$HOME/data/agent_swe_bench}" "${INFERENCE_BACKEND:=vllm}" "${ENGINE_MEMORY:=0.8}"
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
