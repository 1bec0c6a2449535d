"""Environment variables: settings of the cluster, and secrets. Imports no module of this project."""

import os
from collections.abc import Mapping

FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_",
    "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_",
    "VLLM_", "SGLANG_", "SGL_",
    "HF_", "TRANSFORMERS_",
    "WANDB_", "MLFLOW_", "SWANLAB_",
)  # fmt: skip
"""Environment variables of the driver that every process of a run gets, on every node, by the beginnings of their
names."""

FORWARDED_NAMES = (
    "LOG_LEVEL", "SKYRL_WAITS", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "MKL_CBWR",
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
"""The same by whole names, the proxies also in lower case."""

NOT_FORWARDED = ("VLLM_HOST_IP", "NCCL_HOSTID")
"""Variables of those prefixes that say something of one machine."""


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's environment variables that are forwarded to every process of a run."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(FORWARDED_PREFIXES) or name.upper() in FORWARDED_NAMES) and name not in NOT_FORWARDED
    }


def scheduling_timeout_seconds() -> float:
    """`SKYRL_RAY_PG_TIMEOUT_IN_S` (180): maximum time for processes to be scheduled in the cluster and start."""
    return float(os.environ.get("SKYRL_RAY_PG_TIMEOUT_IN_S", "180"))


def endpoint_api_key() -> str | None:
    """`SKYRL_ENDPOINT_API_KEY` (none): key that clients of the OpenAI-compatible endpoint must send."""
    return os.environ.get("SKYRL_ENDPOINT_API_KEY") or None


ENGINE_API_KEY = "SKYRL_ENGINE_API_KEY"


def engine_api_key() -> str | None:
    """`SKYRL_ENGINE_API_KEY` (none): key of external rollout servers, read by servers and trainer."""
    return os.environ.get(ENGINE_API_KEY) or None
