"""Validation of the settings of a run. `typed.py` checks types and choices; `rules/` has the rules between settings.

Every violation is a ConfigError that names the setting, its value, the rule and the likely fix. Torch, the registries
and the environments are imported only when a rule asks for them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.config.bounds import check_bounds
from skyrl_train.config.config import SkyRLConfig, get_config_as_dict
from skyrl_train.config.fingerprint import fill_fingerprint
from skyrl_train.config.rules.algorithm import check_algorithm, replace_deprecated_settings
from skyrl_train.config.rules.asynchronous import check_asynchronous, replace_deprecated_async_settings
from skyrl_train.config.rules.batches import check_packing, validate_batch_sizes
from skyrl_train.config.rules.checks import check_positive, check_rule
from skyrl_train.config.rules.distillation import check_distillation
from skyrl_train.config.rules.engines import check_backend, check_engines
from skyrl_train.config.rules.environments import validate_environments
from skyrl_train.config.rules.generation import check_generation
from skyrl_train.config.rules.launcher import check_cluster, check_inline_engines, check_ranks
from skyrl_train.config.rules.models import check_adapters, check_division, check_models, check_optimizer
from skyrl_train.config.rules.routing_replay import check_routing_replay
from skyrl_train.config.rules.run import check_checkpoints, check_loggers, check_paths, check_profiler
from skyrl_train.config.rules.sampling_mask_replay import check_sampling_mask_replay
from skyrl_train.config.rules.training_backend import check_training_backend
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig, check_unread_settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

Supervised = TypeVar("Supervised", bound=SupervisedConfig)

__all__ = [
    "validate_batch_sizes",
    "validate_cfg",
    "validate_environments",
    "validate_generator_cfg",
    "validate_supervised_cfg",
]


def validate_cfg(cfg: "SkyRLConfig | Mapping[str, Any] | DictConfig") -> SkyRLConfig:
    """Return the settings of a training run, typed and checked, with every `auto` resolved for this machine.

    Call it on the driver, before Ray starts. Custom losses and advantage estimators must be registered by then.

    Raises:
        ConfigError: a setting is unknown, refused, of the wrong type, impossible or contradictory.
    """
    config = validate_generator_cfg(cfg)
    check_positive(config, ("trainer.epochs", "trainer.max_training_steps", "trainer.update_epochs_per_batch"))
    check_rule(bool(config.data.train_data), "data.train_data is empty; set it to at least one training set")
    check_rule(
        config.generator.model_name == config.trainer.policy.model.path,
        f"generator.model_name={config.generator.model_name!r} must be "
        f"trainer.policy.model.path={config.trainer.policy.model.path!r}: engines receive the policy's weights; "
        "remove generator.model_name",
    )
    check_rule(
        config.generator.sampling_params.temperature > 0,
        f"generator.sampling_params.temperature={config.generator.sampling_params.temperature} must be greater than "
        "0: greedy responses to one prompt are identical, so their rewards do not differ",
    )
    replace_deprecated_settings(config)
    replace_deprecated_async_settings(config)
    check_checkpoints(config)
    check_profiler(config)
    check_models(config)
    check_training_backend(config)
    check_routing_replay(config)
    check_sampling_mask_replay(config)
    validate_batch_sizes(config)
    check_algorithm(config)
    check_distillation(config)
    check_ranks(config)
    check_asynchronous(config)
    return config


def validate_generator_cfg(cfg: "SkyRLConfig | Mapping[str, Any] | DictConfig") -> SkyRLConfig:
    """Return the settings of a generation or evaluation run, without the rules of training. See `validate_cfg`."""
    config_type = type(cfg) if isinstance(cfg, SkyRLConfig) else SkyRLConfig
    config = config_type.from_dict(get_config_as_dict(cfg))  # a copy; settings created in Python are type-checked here
    fill_fingerprint(config)
    _resolve_automatic_choices(config)
    check_paths(config)
    check_generation(config)
    check_engines(config)
    check_cluster(config)
    check_inline_engines(config)
    check_loggers(config)
    return config


def validate_supervised_cfg(cfg: "Mapping[str, Any] | DictConfig", config_type: type[Supervised]) -> Supervised:
    """Return the settings of supervised training (`SupervisedConfig`, `PreferenceConfig`). See `validate_cfg`."""
    settings = config_type.from_dict(get_config_as_dict(cfg))
    check_unread_settings(settings)
    fill_fingerprint(settings)
    config, trainer = settings.to_training_config(), settings.trainer
    trainer.placement.device = trainer.placement.resolve_device()
    check_positive(
        config,
        (
            "trainer.epochs",
            "trainer.max_training_steps",
            "trainer.train_batch_size",
            "trainer.eval_batch_size",
            "trainer.micro_train_batch_size_per_gpu",
            "trainer.max_tokens_per_microbatch",
            "trainer.logprobs_chunk_size",
            "trainer.policy.sequence_parallel_size",
            "trainer.algorithm.max_seq_len",
        ),
    )
    for name, section in trainer.algorithm.sections.items():
        check_bounds(section, f"trainer.algorithm.{name}")
    check_rule(bool(settings.data.train_data), "data.train_data is empty; set it to at least one training set")
    check_rule(settings.data.max_length > 0, f"data.max_length must be greater than 0; got {settings.data.max_length}")
    check_packing(config)
    check_paths(config)
    check_loggers(config)
    check_checkpoints(config)
    check_profiler(config)
    check_optimizer(trainer.policy.optimizer_config, "trainer.policy.optimizer_config")
    with_pairs = isinstance(settings, PreferenceConfig)  # the reference must see the same data as the policy
    check_adapters(trainer.policy.model.lora, "trainer.policy.model.lora", dropout_allowed=not with_pairs)
    check_division(trainer.policy, "policy", trainer.placement.policy_world_size)
    check_cluster(config)
    check_training_backend(config)
    check_ranks(config)
    if with_pairs:
        check_division(trainer.ref, "ref", trainer.placement.ref_world_size)
    return settings


def _resolve_automatic_choices(config: SkyRLConfig) -> None:
    device = config.trainer.placement.resolve_device()
    check_rule(
        not (device == "cpu" and config.generator.weight_sync_backend == "nccl"),
        "generator.weight_sync_backend=nccl needs GPUs, but models are placed on the CPU "
        f"(trainer.placement.device={config.trainer.placement.device}); use auto or gloo",
    )
    config.trainer.placement.device = device
    check_backend(config.generator)
    if config.generator.run_engines_locally:
        inline = config.trainer.placement.launcher == "inline"
        config.generator.backend = config.generator.resolve_backend("cpu" if inline else device)
    config.generator.weight_sync_backend = config.generator.resolve_weight_sync_backend(device)
