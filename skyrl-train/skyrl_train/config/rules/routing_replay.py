"""Rules of routing replay: training backend and engines must support the routes of a mixture of experts."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.rules.checks import check_rule, check_sampled_tokens_are_kept, format_choices
from skyrl_train.config.training_backends import TrainingBackendRegistry


def check_routing_replay(config: SkyRLConfig) -> None:
    """Check that `trainer.policy.routing_replay` fits the training backend, the engines and the conversations. Runs
    after `auto` is resolved. (Whether the model is a mixture is checked at loading.)"""
    replay = config.trainer.policy.routing_replay
    if replay == "off":
        return
    setting = f"trainer.policy.routing_replay={replay}"
    strategies = TrainingBackendRegistry.list_registrations()
    names = [name for name, entry in strategies.items() if entry.requires.routing_replay]
    check_rule(
        config.trainer.strategy in names,
        f"trainer.strategy={config.trainer.strategy} does not support routing replay: {setting} must be off, or use "
        f"{format_choices('trainer.strategy', names)}",
    )
    if replay == "R3":
        _check_engines(config, setting)


def _check_engines(config: SkyRLConfig, setting: str) -> None:
    """Check that the engine records the routes of every token, as R3 needs."""
    generator = config.generator
    names = [name for name, entry in EngineRegistry.list_registrations().items() if entry.requires.expert_routes]
    check_rule(
        generator.run_engines_locally,
        f"{setting} needs engines that return the selected experts; external servers "
        "(generator.run_engines_locally=false) do not. Use engines of this run "
        f"({format_choices('generator.backend', names)}), or R2",
    )
    check_rule(
        generator.backend in names,
        f"{setting} needs an engine that returns the selected experts, but generator.backend={generator.backend} does "
        f"not; use {format_choices('generator.backend', names)}, or R2",
    )
    check_sampled_tokens_are_kept(generator, setting, "use R2")
