"""Settings of the backend `skyrl_train` (`--backend-config`). Light: no torch, no Ray."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from skyrl_train.config import GeneratorConfig, PlacementConfig, SkyRLConfig, validate_generator_cfg
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.rules.engines import check_backend
from skyrl_train.config.typed import build
from skyrl_train.errors import ConfigError as TrainerConfigError
from tx.errors import ConfigError
from tx.tinker.backends.base import check_setting_names

GENERATOR_SETTINGS = (
    "backend",
    "num_inference_engines",
    "inference_engine_tensor_parallel_size",
    "remote_inference_engine_urls",
    "model_dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "fully_sharded_loras",
    "engine_init_kwargs",
    "max_engine_restarts",
    "engine_start_timeout_seconds",
    "engine_control_timeout_seconds",
    "engine_health_interval_seconds",
    "request_timeout_seconds",
)
"""Settings of skyrl_train's `generator.*` that apply to serving engines. They have that prefix and meaning here,
too.
"""
TRAINING_SETTINGS = (
    "tokens_per_micro_batch",
    "chunk_size",
    "gradient_checkpointing",
    "grouped_adapters",
    "max_resident_models",
    "trust_remote_code",
)
"""Settings of the `torch` backend's `TrainingSettings` that training here has as well, with the same meaning."""
_PREFIX = "generator."


@dataclass(frozen=True, kw_only=True)
class SkyRLTrainSettings:
    """Settings of the `skyrl_train` backend that other backends do not have."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training processes and engines; Ray assigns the GPUs. `auto`: GPUs if this machine has one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the base model, in training and (unless `generator.model_dtype` is set) in engines. None:
    float32 on a CPU, else bfloat16."""
    num_processes: int = 1
    """Number of Ray processes that train together, with the base model sharded over them (FSDP2), on one GPU each.
    Engines have GPUs of their own."""
    process_timeout_seconds: float = 600.0
    """Timeout of a training process, in seconds: if one does not answer, the engine process is restarted."""
    max_lora_rank: int = 32
    """Maximum rank of adapters; larger ones are refused. vLLM reserves memory for `max_loaded_adapters` adapters of
    this rank."""
    max_loaded_adapters: int = 8
    """Maximum number of adapters loaded in each engine; requests for further ones wait."""
    freeze_unembed: bool = False
    """Do not adapt the output layer, whatever a request's `train_unembed` says, as engines other than `native` cannot.
    False: such requests are refused."""
    ray_address: str | None = None
    """Address `HOST:PORT` of a Ray cluster to join. None: that of RAY_ADDRESS, or a cluster on this machine that ends
    with the server."""
    training: Mapping[str, Any] = field(default_factory=dict)
    generator: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SkyRLTrainSettings":
        """Read and check the settings, as far as possible without torch.

        Raises:
            ConfigError: an unknown name (suggests the nearest), an invalid value, or engines that are not installed.
        """
        check_setting_names(values, get_setting_names())
        own, sections = {}, {"training": {}, "generator": {}}
        for name, value in values.items():
            if name.startswith(_PREFIX):
                sections["generator"][name.removeprefix(_PREFIX)] = value
            else:
                (sections["training"] if name in TRAINING_SETTINGS else own)[name] = value
        try:
            settings = build(cls, own | sections, "backend_config")
            check_backend(build(GeneratorConfig, settings._build_generator_values(), "generator", SkyRLConfig))
        except TrainerConfigError as error:
            raise ConfigError(str(error)) from error
        for name in ("num_processes", "process_timeout_seconds", "max_lora_rank", "max_loaded_adapters"):
            if not getattr(settings, name) > 0:
                raise ConfigError(f"backend_config.{name} must be above 0; got {getattr(settings, name)}")
        return settings

    def engine_config(self, base_model: Path, run_folder: Path, max_context: int) -> SkyRLConfig:
        """skyrl_train's settings of a run that only generates, checked. Logs go to `run_folder`.

        Raises:
            ConfigError: of skyrl_train.
        """
        placement = PlacementConfig(colocate_all=False, policy_num_gpus_per_node=self.num_processes, device=self.device)
        placement.device = placement.resolve_device()
        model = {"path": str(base_model), "lora": {"rank": self.max_lora_rank}}
        trainer = {"policy": {"model": model}, "placement": asdict(placement), "run_dir": str(run_folder)}
        dtype = self.resolved_dtype(placement.device)
        values = {"trainer": trainer, "generator": {"model_dtype": dtype} | self._build_generator_values()}
        config = validate_generator_cfg(values)
        own_kwargs = {"max_model_len": max_context} | self._get_adapter_limits(config.generator.backend)
        config.generator.engine_init_kwargs = own_kwargs | config.generator.engine_init_kwargs
        return config

    def resolved_dtype(self, device: str) -> str:
        """`dtype`, with None resolved."""
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")

    def _build_generator_values(self) -> dict[str, Any]:
        remote = "remote_inference_engine_urls" in self.generator
        defaults = {"backend": "auto" if remote else "vllm", "run_engines_locally": not remote}
        return defaults | {"weight_sync_strategy": "adapter"} | dict(self.generator)

    def _get_adapter_limits(self, backend: str) -> dict[str, Any]:
        keyword, spare = EngineRegistry.get_requirements(backend).adapter_slots
        return {keyword: self.max_loaded_adapters + spare}


def get_setting_names() -> list[str]:
    """Return every valid name in `--backend-config`."""
    own = [field.name for field in fields(SkyRLTrainSettings) if field.name not in ("training", "generator")]
    return [*own, *TRAINING_SETTINGS, *(_PREFIX + name for name in GENERATOR_SETTINGS)]
