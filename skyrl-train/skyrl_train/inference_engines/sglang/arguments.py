"""Conversion of engine settings to SGLang's arguments."""

import importlib
import json
from collections.abc import Mapping

from skyrl_gym.suggestions import did_you_mean
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.engine_settings import EngineSettings
from skyrl_train.inference_engines.sglang.weight_loader import NAME

_ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 65536,  # else it takes most of the machine's memory
    "mem_fraction_static": 0.1,
}


def build_server_arguments(settings: EngineSettings) -> dict[str, object]:
    """Build the fields of SGLang's `ServerArgs`.

    Raises:
        ConfigError: a setting that SGLang does not support.
    """
    if settings.engine_init_kwargs:
        _check_names(settings.engine_init_kwargs)
    if settings.fully_sharded_loras:
        raise ConfigError("generator.fully_sharded_loras=true is supported only by generator.backend=vllm")
    on_cpu = settings.device == "cpu"
    arguments: dict[str, object] = {
        "model_path": settings.model_path,
        "device": settings.device.split(":")[0],
        "dtype": settings.dtype,
        "tp_size": settings.tensor_parallel_size,
        "pp_size": settings.pipeline_parallel_size,
        "dp_size": settings.data_parallel_size,
        "ep_size": settings.expert_parallel_size,
        "max_running_requests": settings.max_num_seqs,
        "chunked_prefill_size": settings.max_num_batched_tokens if settings.enable_chunked_prefill else -1,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "disable_cuda_graph": settings.enforce_eager,
        "disable_radix_cache": not settings.enable_prefix_caching,
        "enable_memory_saver": settings.sleep_mode,
        # Without it SGLang loses its weights in a level-1 sleep, which must keep them.
        "enable_weights_cpu_backup": settings.sleep_mode,
        "enable_deterministic_inference": not on_cpu,  # without it SGLang ignores seeds
        "random_seed": settings.seed,
        "custom_weight_loader": [NAME],
        "skip_server_warmup": True,
    }
    if settings.max_model_len is not None:
        arguments["context_length"] = settings.max_model_len
    if settings.max_lora_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": settings.max_lora_rank, "lora_target_modules": ["all"]}
    if settings.model_config_kwargs:
        arguments["json_model_override_args"] = json.dumps(dict(settings.model_config_kwargs))
    if settings.dummy_weights:
        arguments["load_format"] = "dummy"
    return arguments | (_ON_CPU if on_cpu else {}) | dict(settings.engine_init_kwargs)


def build_command_line(arguments: Mapping[str, object]) -> list[str]:
    """Build the options for SGLang's launcher."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return words


def _check_names(engine_init_kwargs: Mapping[str, object]) -> None:
    described = importlib.import_module("sglang.srt.server_args").ServerArgs  # an optional dependency, slow to import
    known = {*described.__annotations__, *getattr(described, "__struct_fields__", ())}
    for name in engine_init_kwargs:
        if name not in known:
            hint = did_you_mean(name, known, otherwise="see `python -m sglang.launch_server --help`")
            raise ConfigError(f"generator.engine_init_kwargs.{name} is not a setting of SGLang; {hint}")
