# Sourced by the scripts below examples/: interpreter, devices, engines, data, and functions that start an entry point.
#
# Environment: NUM_NODES, NUM_GPUS (per node), TENSOR_PARALLEL (GPUs per engine), ENGINE_MEMORY (fraction of a GPU's
# memory), INFERENCE_BACKEND, DATA_DIR, LOGGER, PYTHON. DEVICE=cpu with INFERENCE_BACKEND=native needs no GPU.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
: "${PYTHON:=${VIRTUAL_ENV:-$root/.venv}/bin/python}" "${LOGGER:=console}" "${DEVICE:=cuda}" "${INFERENCE_BACKEND:=auto}"
: "${NUM_NODES:=1}" "${NUM_GPUS:=8}" "${TENSOR_PARALLEL:=1}" "${ENGINE_MEMORY:=}"
# The native engine uses one GPU and allocates what it needs.
if [ "$INFERENCE_BACKEND" = native ]; then TENSOR_PARALLEL=1 ENGINE_MEMORY=; fi

data=(data.train_data="['${DATA_DIR:-}/train.parquet']" data.val_data="['${DATA_DIR:-}/validation.parquet']")
engines=(
  trainer.placement.device="$DEVICE"
  trainer.logger="$LOGGER"
  generator.backend="$INFERENCE_BACKEND"
  generator.num_inference_engines="$((NUM_NODES * NUM_GPUS / TENSOR_PARALLEL))"
  generator.inference_engine_tensor_parallel_size="$TENSOR_PARALLEL"
  ${ENGINE_MEMORY:+generator.gpu_memory_utilization="$ENGINE_MEMORY"}
)

# train key=value ...: start $ENTRY_POINT; workers and engines share all GPUs.
train() {
  "$PYTHON" -m "${ENTRY_POINT:-skyrl_train.entrypoints.main_base}" "${data[@]}" "${engines[@]}" \
    trainer.placement.colocate_all=true \
    trainer.placement.policy_num_nodes="$NUM_NODES" trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
    trainer.placement.ref_num_nodes="$NUM_NODES" trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" "$@"
}

# evaluate RECIPE ROW key=value ...: grade completions of $MODEL, write them below $OUTPUT and print the row of the table.
: "${OUTPUT:=$PWD/evaluations}"
evaluate() {
  : "${MODEL:?set MODEL to a folder or a hub name}"
  local name="$1/${2:-$(basename "$MODEL")}"
  "$PYTHON" -m skyrl_train.entrypoints.main_generate "${engines[@]}" "${data[1]}" trainer.policy.model.path="$MODEL" \
    trainer.dump_eval_results=true trainer.export_path="$OUTPUT/$name" \
    trainer.project_name=evaluation trainer.run_name="$name" "${@:3}"
  "$PYTHON" "$root/examples/recipes/table.py" "$1" "${name#*/}" "$OUTPUT/$name"
}
