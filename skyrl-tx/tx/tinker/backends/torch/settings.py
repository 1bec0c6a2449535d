"""Settings of the torch backend's training (`--backend-config`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch

from skyrl_train.config.bounds import Above, AtLeast, check_bounds
from skyrl_train.config.typed import build
from skyrl_train.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of training in the `torch` backend. None is replaced in `resolved`."""

    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`, …; `auto`: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the base model and its activations; adapters, gradients and optimizer are always float32. None:
    float32 on a CPU, else bfloat16."""
    tokens_per_micro_batch: Annotated[int | None, AtLeast(1)] = None
    """Maximum number of tokens in memory at a time. A longer datum is a micro-batch of its own. None: 2048 on a CPU,
    else 16384."""
    chunk_size: Annotated[int, AtLeast(1)] = 1024
    """Number of tokens whose logits are in memory at a time; a multiple of 32."""
    max_lora_rank: Annotated[int, AtLeast(1)] = 128
    """Maximum rank of adapters; larger ones are refused."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, a third more time."""
    max_resident_models: Annotated[int, AtLeast(1)] = 64
    """Maximum number of adapters in memory at a time."""
    grouped_adapters: bool = False
    """Compute the adapters of all models of a pass, and of all experts of a layer, in one product each (torch's
    `grouped_mm`). For CUDA, but tested on CPUs only, where it is slower in float32. Ranks must be a multiple of 8 in
    bfloat16 (4 in float32); others are computed one by one."""
    trust_remote_code: bool = False
    """Run the model's own code, if its folder contains some."""
    num_processes: Annotated[int, AtLeast(1)] = 1
    """Number of processes on this machine that train together, with the base model sharded over them (FSDP2); on CUDA,
    each on its own GPU. Sampling uses another, whole copy of the model."""
    process_timeout_seconds: Annotated[float, Above(0)] = 600.0
    """Timeout of a training process, in seconds (with more than one process): if one does not answer, training is
    restarted."""

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "TrainingSettings":
        """Read and check settings, and resolve those that depend on the device.

        Raises:
            ConfigError: an unknown name, or a value that is impossible.
        """
        return build(cls, values, "backend_config").resolved()

    def resolved(self) -> "TrainingSettings":
        """Return the settings with all defaults resolved.

        Raises:
            ConfigError: a value is impossible.
        """
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        on_cpu = _resolve_device(device).type == "cpu"
        dtype = self.dtype or ("float32" if on_cpu else "bfloat16")
        tokens = self.tokens_per_micro_batch or (2048 if on_cpu else 16384)
        open_ones = {"device": device, "dtype": dtype, "tokens_per_micro_batch": tokens}
        settings = TrainingSettings(**(asdict(self) | open_ones))
        check_bounds(settings, "backend_config")
        if settings.chunk_size % 32:
            raise ConfigError(f"backend_config.chunk_size must be a multiple of 32; got {settings.chunk_size}")
        settings._check_devices()
        return settings

    def _check_devices(self) -> None:
        device, count = self.torch_device, torch.cuda.device_count()
        if self.num_processes == 1 or device.type == "cpu":
            return
        if device.index is not None:
            raise ConfigError(
                f"backend_config.num_processes={self.num_processes} uses the first GPUs: set device=cuda, and "
                f"CUDA_VISIBLE_DEVICES to select them; got device={self.device!r}"
            )
        if self.num_processes > count:
            raise ConfigError(
                f"backend_config.num_processes must be at most the number of GPUs, {count}; got {self.num_processes}"
            )

    @property
    def torch_device(self) -> torch.device:
        return _resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype or "float32"]


def _resolve_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"backend_config.device must be auto, cpu, cuda or cuda:N; got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"backend_config.device={name!r}: this machine has {torch.cuda.device_count()} such devices")
    return device
