"""Settings of the torch backend's training (`--backend-config`)."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from skyrl_train.errors import ConfigError
from tx.tinker.backends.base import check_setting_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of training in the `torch` backend. None is replaced in `resolved`."""

    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`, …; `auto`: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the base model and its activations; adapters, gradients and optimizer are always float32. None:
    float32 on a CPU, else bfloat16."""
    tokens_per_micro_batch: int | None = None
    """Maximum number of tokens in memory at a time. A longer datum is a micro-batch of its own. None: 2048 on a CPU,
    else 16384."""
    chunk_size: int = 1024
    """Number of tokens whose logits are in memory at a time; a multiple of 32."""
    max_lora_rank: int = 128
    """Maximum rank of adapters; larger ones are refused."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, a third more time."""
    max_resident_models: int = 64
    """Maximum number of adapters in memory at a time."""
    trust_remote_code: bool = False
    """Run the model's own code, if its folder contains some."""
    num_processes: int = 1
    """Number of processes on this machine that train together, with the base model sharded over them (FSDP2); on CUDA,
    each on its own GPU. Sampling uses another, whole copy of the model."""
    process_timeout_seconds: float = 600.0
    """Timeout of a training process, in seconds (with more than one process): if one does not answer, training is
    restarted."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingSettings":
        """Read and check settings, and resolve those that depend on the device.

        Raises:
            ConfigError: an unknown name, or a value that is impossible.
        """
        check_setting_names(values, [field.name for field in fields(cls)], ConfigError)
        return cls(**values).resolved()

    def resolved(self) -> "TrainingSettings":
        """Return the settings with all defaults resolved.

        Raises:
            ConfigError: a value is impossible.
        """
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        on_cpu = _device(device).type == "cpu"
        dtype = self.dtype or ("float32" if on_cpu else "bfloat16")
        if dtype not in DTYPES:
            raise ConfigError(f"backend_config.dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        tokens = self.tokens_per_micro_batch or (2048 if on_cpu else 16384)
        open_ones = {"device": device, "dtype": dtype, "tokens_per_micro_batch": tokens}
        settings = TrainingSettings(**(asdict(self) | open_ones))
        for name in ("tokens_per_micro_batch", "chunk_size", "max_lora_rank", "max_resident_models", "num_processes"):
            _check_positive(name, getattr(settings, name))
        for name in ("gradient_checkpointing", "trust_remote_code"):
            if not isinstance(getattr(settings, name), bool):
                raise ConfigError(f"backend_config.{name} must be true or false; got {getattr(settings, name)!r}")
        if settings.chunk_size % 32:
            raise ConfigError(f"backend_config.chunk_size must be a multiple of 32; got {settings.chunk_size}")
        seconds = settings.process_timeout_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ConfigError(f"backend_config.process_timeout_seconds must be a number above 0; got {seconds!r}")
        settings._check_devices()
        return settings

    def _check_devices(self) -> None:
        device, count = self.torch_device, torch.cuda.device_count()
        if self.num_processes == 1 or device.type == "cpu":
            return
        if device.index is not None:
            raise ConfigError(
                f"backend_config.num_processes={self.num_processes} takes the first so many GPUs: set device=cuda, and "
                f"CUDA_VISIBLE_DEVICES to choose them; got device={self.device!r}"
            )
        if self.num_processes > count:
            raise ConfigError(
                f"backend_config.num_processes must be at most the number of GPUs, {count}; got {self.num_processes}"
            )

    @property
    def torch_device(self) -> torch.device:
        return _device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype or "float32"]


def _device(name: Any) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"backend_config.device must be auto, cpu, cuda or cuda:N; got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"backend_config.device={name!r}: this machine has {torch.cuda.device_count()} such devices")
    return device


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"backend_config.{name} must be a whole number above 0; got {value!r}")
