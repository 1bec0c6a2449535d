#!/bin/sh
# Makes an environment with SGLang for a machine without a GPU, and with this repository's packages and test tools in it:
#
#     scripts/setup_sglang_cpu.sh FOLDER
#     cd skyrl-train && OMP_NUM_THREADS=1 FOLDER/bin/python -m pytest tests/inference_engines/sglang -m full
#
# SGLang publishes no kernels for plain CPUs, and asks for a torch, kernels and a torchvision of CUDA. What it asks for and
# does not need here is left out; tests/inference_engines/sglang/cpu_support stands in for the two packages that it
# imports all the same. Good for trying the engine's protocol, not for training.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
folder=$1
repository=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

command -v uv >/dev/null || "$python" -m pip install --quiet uv
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

uv venv --python "$python" "$folder"
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
echo "torch==2.13.0" >"$overrides"
for package in \
    cuda-python flash-attn-4 flashinfer-python humming-kernels modelscope nvidia-cutlass-dsl nvidia-mathdx nvshmem4py-cu13 \
    py-spy quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel smg-grpc-servicer tilelang timm \
    torch-memory-saver torchaudio torchcodec torchvision; do
    echo "$package ; sys_platform == 'never'" >>"$overrides"
done
uv pip install --python "$folder/bin/python" --exclude-newer 2026-11-20T00:00:00Z --compile-bytecode \
    --overrides "$overrides" \
    "sglang==0.5.23" -e "$repository/skyrl-gym" -e "$repository/skyrl-train" \
    "pytest==9.2.0" "pytest-asyncio>=1.2" "pytest-timeout>=2.4"
"$folder/bin/python" -c "import sglang, torch; print('sglang', sglang.__version__, 'with torch', torch.__version__)"
