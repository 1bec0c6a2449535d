"""Rules of the training backend: its traits against the requirements of the run."""

import warnings

from skyrl_train.config.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.models import CriticConfig, PolicyConfig
from skyrl_train.config.rules.checks import check_rule
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.config.typed import iter_settings


def replace_deprecated_strategy(trainer: TrainerConfig) -> None:
    """Replace a backend's name in other releases by the current one, with a warning."""
    present = TrainingBackendRegistry.get_requirements(trainer.strategy).alias_of
    if present is not None:
        warnings.warn(
            f"trainer.strategy={trainer.strategy} is an alias of trainer.strategy={present}, which has "
            "the same settings",
            FutureWarning,
            stacklevel=4,
        )
        trainer.strategy = present


def check_training_backend(config: SkyRLConfig) -> None:
    """Check that the backend of `trainer.strategy` is installed and supports all models of the run."""
    trainer, placement = config.trainer, config.trainer.placement
    replace_deprecated_strategy(trainer)
    strategy = f"trainer.strategy={trainer.strategy}"
    traits = TrainingBackendRegistry.get_requirements(trainer.strategy)
    check_rule(traits.is_installed, f"{strategy} needs the package {traits.library}: {traits.install_hint}")
    _check_sections(config)
    traits.check_settings(config)
    check_rule(
        traits.compiled_layers or not trainer.compile_layers,
        f"{strategy} does not support compiled layers: trainer.compile_layers=true must be false, or use "
        "trainer.strategy=fsdp2",
    )
    trained: dict[str, PolicyConfig | CriticConfig] = {"policy": trainer.policy}
    if trainer.critic.model.path is not None:
        trained["critic"] = trainer.critic
    for name, model in trained.items():
        rank = model.model.lora.rank
        check_rule(
            rank == 0 or traits.adapters,
            f"{strategy} does not support adapters: trainer.{name}.model.lora.rank={rank} must be 0, or "
            "use another strategy",
        )
    num_ranks = {name: getattr(placement, f"{name}_world_size") for name in trained}
    if trainer.num_reference_models:
        num_ranks["ref"] = placement.ref_world_size
    for name, count in num_ranks.items():
        check_rule(
            traits.max_ranks is None or count <= traits.max_ranks,
            f"{strategy} supports at most {traits.max_ranks} ranks per model; trainer.placement.{name}_num_nodes x "
            f"{name}_num_gpus_per_node is {count}: reduce it, or use another strategy",
        )
        size: int = getattr(trainer, name).sequence_parallel_size
        check_rule(
            size == 1 or traits.sequence_parallel,
            f"{strategy} does not support sequence parallelism: trainer.{name}.sequence_parallel_size={size} must be "
            "1, or use another strategy",
        )


def _check_sections(config: SkyRLConfig) -> None:
    """Check that settings that only another backend reads are at their defaults."""
    strategy = config.trainer.strategy
    names = TrainingBackendRegistry.list_registrations()
    others = {TrainingBackendRegistry.get_requirements(name).section for name in names if name != strategy} - {None}
    unchanged = SkyRLConfig().trainer
    defaults = {name: getattr(section, field.name) for name, section, field in iter_settings(unchanged, "trainer")}
    for name, section, field in iter_settings(config.trainer, "trainer"):
        if others.isdisjoint(name.split(".")):
            continue
        value = getattr(section, field.name)
        check_rule(
            value == defaults[name],
            f"{name}={value!r} has no effect with trainer.strategy={strategy}; keep it at {defaults[name]!r}, or use "
            "another strategy",
        )
