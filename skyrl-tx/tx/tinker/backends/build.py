"""Builds a backend from settings: the only module that knows concrete backends. Cheap to import."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tx.errors import ConfigError
from tx.tinker.backends.base import Backend, check_setting_names
from tx.tinker.config import EngineConfig

if TYPE_CHECKING:
    from tx.tinker.base_model import BaseModelFacts

SAMPLING_SETTINGS: dict[str, type] = {
    "max_num_seqs": int,
    "max_loaded_adapters": int,
    "max_prefill_tokens": int,
    "max_cache_gib": float,
    "prefix_cache_gib": float,
}
"""Settings of `--backend-config` for sampling only (documented at `NativeSampling`). The others are `TrainingSettings`,
whose device, dtype and maximum rank apply to sampling as well."""


def build_backend(config: EngineConfig, facts: "BaseModelFacts") -> Backend:
    """Load the base model.

    Raises:
        ConfigError: a setting of `backend_config` is unknown or impossible, or the model cannot be used here.
    """
    from skyrl_train.errors import ConfigError as TrainerConfigError

    try:
        if config.backend == "skyrl_train":
            from tx.tinker.backends.skyrl_train.build import build

            return build(config, facts)
        return _build_torch_backend(dict(config.backend_config), facts, config.state_folder / "logs")
    except TrainerConfigError as error:
        raise ConfigError(str(error)) from error


def check_backend(config: EngineConfig) -> None:
    """Check `backend_config` as far as possible without torch.

    Raises:
        ConfigError: a setting is unknown or invalid, or a required package is not installed.
    """
    if config.backend == "skyrl_train":
        from tx.tinker.backends.skyrl_train.settings import SkyRLTrainSettings

        SkyRLTrainSettings.from_dict(config.backend_config)


def extract_training_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `TrainingSettings` among the settings of the `torch` backend."""
    return {name: value for name, value in values.items() if name not in SAMPLING_SETTINGS}


def import_backend(config: EngineConfig) -> None:
    """Import the modules of `build_backend`, which take most of the start-up of a small model."""
    if config.backend == "torch":
        from tx.tinker.backends.torch import sampling, training  # noqa: F401


def _build_torch_backend(settings: dict[str, Any], facts: "BaseModelFacts", log_folder: Path) -> Backend:
    from skyrl_train.utils.cpu_numerics import prepare_cpu
    from tx.tinker.backends.torch.settings import TrainingSettings

    prepare_cpu()
    check_setting_names(settings, [*(field.name for field in fields(TrainingSettings)), *SAMPLING_SETTINGS])
    for_sampling = {name: settings.pop(name) for name in SAMPLING_SETTINGS if name in settings}
    for name, value in for_sampling.items():
        whole = SAMPLING_SETTINGS[name] is int
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value <= 0:
            raise ConfigError(
                f"backend_config.{name} must be a {'whole ' if whole else ''}number above 0; got {value!r}"
            )
    resolved = TrainingSettings.from_dict(settings)

    from tx.tinker.backends.torch.sampling import NativeSampling  # seconds, which a wrong setting need not cost

    if resolved.num_processes == 1:
        from tx.tinker.backends.torch.training import TorchTraining

        training = TorchTraining(facts.folder, **settings)
        shared = training.base_model
    else:
        from skyrl_train.orchestration.process_ranks import ProcessRanks
        from tx.tinker.backends.torch.group import GroupTraining, TrainingRanks
        from tx.tinker.backends.torch.training_rank import TrainingRank

        options, seconds = asdict(resolved), resolved.process_timeout_seconds
        count, device = options.pop("num_processes"), options.pop("device")
        args = (str(facts.folder), options, seconds)
        ranks = ProcessRanks("training", TrainingRank, args, num_ranks=count, device=device, log_folder=log_folder)
        training, shared = GroupTraining(TrainingRanks(ranks, device=device, timeout_seconds=seconds)), None
    sampling = NativeSampling(
        facts.folder,
        device=resolved.device,
        dtype=resolved.dtype or "float32",
        max_context=training.info().max_context,
        max_lora_rank=resolved.max_lora_rank,
        share_with=shared,
        **for_sampling,
    )
    return Backend(training=training, sampling=sampling)
