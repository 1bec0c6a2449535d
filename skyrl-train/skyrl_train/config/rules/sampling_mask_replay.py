"""Rules of sampling-mask replay: engines return the tokens kept by truncation, training renormalizes over them."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.rules.checks import check_rule, check_sampled_tokens_are_kept, format_choices
from skyrl_train.config.training_backends import TrainingBackendRegistry

_SETTING = "trainer.policy.sampling_mask_replay=true"


def check_sampling_mask_replay(config: SkyRLConfig) -> None:
    """Check that `trainer.policy.sampling_mask_replay` fits sampling, training backend, engines and conversations. Runs
    after `auto` is resolved."""
    if not config.trainer.policy.sampling_mask_replay:
        return
    _check_sampling(config)
    _check_engines(config)
    strategies = TrainingBackendRegistry.list_registrations()
    names = [name for name, each in strategies.items() if each.requires.sampling_masks and not each.requires.alias_of]
    check_rule(
        config.trainer.strategy in names,
        f"trainer.strategy={config.trainer.strategy} does not compute log-probs over recorded tokens (its vocabulary "
        f"is sharded over ranks, or its backend does not declare `sampling_masks`): {_SETTING} needs "
        f"{format_choices('trainer.strategy', names)}",
    )
    teachers = config.trainer.distillation.teachers
    check_rule(
        not teachers,
        f"{_SETTING} cannot be combined with trainer.distillation.teachers ({', '.join(teachers)}), whose log-probs "
        "are over the full vocabulary. Disable it, and sample with generator.sampling_params.top_p=1 and top_k=-1",
    )


def _check_sampling(config: SkyRLConfig) -> None:
    params = config.generator.sampling_params
    check_rule(
        params.top_k > 0,
        f"generator.sampling_params.top_k={params.top_k} (off) must be above 0 with {_SETTING}: it bounds the number "
        "of tokens recorded per position, also if top_p or min_p truncate. Set top_k (for example 512, which rarely "
        "truncates more than top_p=0.95), or disable the replay",
    )
    check_rule(
        params.repetition_penalty == 1,
        f"generator.sampling_params.repetition_penalty={params.repetition_penalty} must be 1 (off) with {_SETTING}: "
        "the penalty changes the logits of kept tokens, which training does not",
    )


def _check_engines(config: SkyRLConfig) -> None:
    generator = config.generator
    names = [name for name, entry in EngineRegistry.list_registrations().items() if entry.requires.kept_tokens]
    fix = f"Use {format_choices('generator.backend', names)}, or disable the replay"
    check_rule(
        generator.run_engines_locally,
        f"{_SETTING} needs engines that return the tokens kept by truncation; external servers "
        f"(generator.run_engines_locally=false) do not. {fix}",
    )
    check_rule(
        generator.backend in names,
        f"{_SETTING} needs an engine that returns the tokens kept by truncation, but "
        f"generator.backend={generator.backend} does not. {fix}",
    )
    check_rule(
        generator.uses_environments,
        f"{_SETTING} cannot be combined with generator.task={generator.task} or generator.harness: agents do not pass "
        "on the tokens kept by truncation. Remove one of them",
    )
    check_sampled_tokens_are_kept(generator, _SETTING, "disable the replay")
