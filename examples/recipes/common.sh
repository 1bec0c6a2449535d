# Sourced by the scripts of all recipes: interpreter, machines, engines, where curves and evaluations go.
#
# Of the environment: NUM_NODES, NUM_GPUS (a node), TENSOR_PARALLEL (GPUs of an engine), ENGINE_MEMORY (its share of a
# GPU's memory), INFERENCE_BACKEND, LOGGER, PYTHON. DEVICE=cpu with INFERENCE_BACKEND=native runs without a GPU, for tiny models.
set -euo pipefail
recipes="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$recipes/../.." && pwd)"
: "${PYTHON:=${VIRTUAL_ENV:-$root/.venv}/bin/python}"
: "${DEVICE:=cuda}"
: "${INFERENCE_BACKEND:=vllm}"
: "${LOGGER:=console}"
: "${NUM_NODES:=1}"
: "${NUM_GPUS:=8}"
: "${TENSOR_PARALLEL:=1}"
: "${ENGINE_MEMORY:=0.8}"
if [ "$INFERENCE_BACKEND" = native ]; then TENSOR_PARALLEL=1; fi # its engines have one GPU each, and take what they need

engines=(
  trainer.placement.device="$DEVICE"
  generator.backend="$INFERENCE_BACKEND"
  generator.num_inference_engines="$((NUM_NODES * NUM_GPUS / TENSOR_PARALLEL))"
  generator.inference_engine_tensor_parallel_size="$TENSOR_PARALLEL"
  trainer.logger="$LOGGER"
)
if [ "$INFERENCE_BACKEND" != native ]; then engines+=(generator.gpu_memory_utilization="$ENGINE_MEMORY"); fi
# Workers and engines take turns on all GPUs.
machines=(
  "${engines[@]}"
  trainer.placement.colocate_all=true
  trainer.placement.policy_num_nodes="$NUM_NODES"
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS"
  trainer.placement.ref_num_nodes="$NUM_NODES"
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS"
)

# evaluate NAME override ...: answers and grades the evaluation set, every answer to a file below $OUTPUT/NAME.
: "${OUTPUT:=$PWD/evaluations}"
evaluate() {
  local name="$1"
  shift
  "$PYTHON" -m skyrl_train.entrypoints.main_generate "${engines[@]}" \
    trainer.policy.model.path="$MODEL" \
    trainer.dump_eval_results=true \
    trainer.export_path="$OUTPUT/$name" \
    trainer.project_name=evaluation \
    trainer.run_name="$name" \
    "$@"
}
