"""The settings of a run: dataclasses, defaults, checks. Imports no torch, no Ray, no Hydra."""

from typing import Any

from skyrl_train.config.algorithm import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    KLCtrlConfig,
    OffPolicyCorrectionConfig,
    OverlongBufferConfig,
    list_registered_sections,
)
from skyrl_train.config.base import BaseConfig
from skyrl_train.config.config import (
    DataConfig,
    EnvironmentConfig,
    PlacementConfig,
    SkyRLConfig,
    SkyRLGymConfig,
    TrainerConfig,
    get_config_as_dict,
    get_config_as_yaml_str,
)
from skyrl_train.config.generation import ChatTemplateConfig, GeneratorConfig, SamplingParams
from skyrl_train.config.models import (
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    TrainedModelConfig,
)
from skyrl_train.config.store import compose_config, config_dir, get_default_config, register_config_store
from skyrl_train.config.validation import validate_cfg, validate_environments, validate_generator_cfg

__all__ = [
    "AlgorithmConfig",
    "BaseConfig",
    "ChatTemplateConfig",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "GeneratorConfig",
    "KLCtrlConfig",
    "LoRAConfig",
    "ModelConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "OverlongBufferConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "SamplingParams",
    "SkyRLConfig",
    "SkyRLGymConfig",
    "TrainedModelConfig",
    "TrainerConfig",
    "compose_config",
    "config_dir",
    "get_config_as_dict",
    "get_config_as_yaml_str",
    "get_default_config",
    "register_config_store",
    "validate_cfg",
    "validate_environments",
    "validate_generator_cfg",
]


def __getattr__(name: str) -> Any:
    """Return the settings of a registered loss or estimator by the name of their class, such as `SAPOConfig`."""
    if not name.startswith("_"):
        for settings in list_registered_sections().values():
            if settings.__name__ == name:
                return settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
