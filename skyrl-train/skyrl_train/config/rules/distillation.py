"""Rules of on-policy distillation: assignment of rows to teachers, their placement, and the compared tokens."""

from dataclasses import fields

from skyrl_train.config.bounds import check_bounds
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.distillation import DistillationConfig, TeacherConfig
from skyrl_train.config.rules.checks import check_rule
from skyrl_train.config.training_backends import TrainingBackendRegistry

NAME = "trainer.distillation"


def check_distillation(config: SkyRLConfig) -> None:
    """Check everything that does not require opening a model."""
    settings = config.trainer.distillation
    if not settings.is_on:
        defaults = DistillationConfig()
        for field in fields(settings):
            value, default = getattr(settings, field.name), getattr(defaults, field.name)
            check_rule(
                value == default,
                f"{NAME}.{field.name}={value} has an effect only with teachers; add one to {NAME}.teachers (python -m "
                "skyrl_train.entrypoints.main_distill), or remove it",
            )
        return
    check_bounds(settings, NAME)
    _check_tokens(config)
    _check_data_sources(settings)
    for name, teacher in settings.teachers.items():
        _check_teacher(config, f"{NAME}.teachers.{name}", teacher)
    kind = config.trainer.algorithm.dynamic_sampling.type
    check_rule(
        kind != "replace" or len(settings.teachers) == 1,
        "trainer.algorithm.dynamic_sampling.type=replace replaces prompts by copies of others, which may have "
        f"another teacher of {NAME}.teachers ({', '.join(settings.teachers)}); use type=filter, or one teacher",
    )


def _check_tokens(config: SkyRLConfig) -> None:
    settings, strategy = config.trainer.distillation, config.trainer.strategy
    check_rule(
        settings.tokens != "sampled" or settings.kl == "reverse",
        f"{NAME}.kl=forward is an expectation over the teacher's distribution, but {NAME}.tokens=sampled compares "
        "only tokens that the student sampled; use tokens=top_k or full, or kl=reverse",
    )
    check_rule(
        settings.tokens == "top_k" or settings.top_k == DistillationConfig().top_k,
        f"{NAME}.top_k={settings.top_k} has an effect only with {NAME}.tokens=top_k; got tokens={settings.tokens}",
    )
    registrations = TrainingBackendRegistry.list_registrations()
    able = [name for name, each in registrations.items() if each.requires.candidates and not each.requires.alias_of]
    check_rule(
        settings.tokens == "sampled" or strategy in able,
        f"{NAME}.tokens={settings.tokens} needs log-probs of tokens that were not sampled, which "
        f"trainer.strategy={strategy} does not compute (its vocabulary is sharded over ranks, or its backend does not "
        f"declare `candidates`); use trainer.strategy={' or '.join(able)}, or tokens=sampled",
    )


def _check_data_sources(settings: DistillationConfig) -> None:
    owner_of: dict[str | None, str] = {}
    for name, teacher in settings.teachers.items():
        check_rule(
            teacher.data_sources != [],
            f"{NAME}.teachers.{name}.data_sources is empty; list data sources, or use null for all that no other "
            "teacher lists",
        )
        for source in teacher.data_sources or [None]:
            other = owner_of.setdefault(source, name)
            check_rule(
                other == name,
                f"{NAME}.teachers.{name}.data_sources and that of {other} both "
                + (f"name {source!r}" if source is not None else "are null, which means all remaining data sources")
                + "; each row needs exactly one teacher",
            )


def _check_teacher(config: SkyRLConfig, setting: str, teacher: TeacherConfig) -> None:
    generator, placement = config.generator, config.trainer.placement
    check_rule(bool(teacher.model), f"{setting}.model is empty; set it to the teacher's folder or hub name")
    check_rule(teacher.engines >= 0, f"{setting}.engines={teacher.engines} must be 0 (training workers) or greater")
    check_rule(
        not (teacher.engines and teacher.urls),
        f"{setting}.engines={teacher.engines} and {setting}.urls={teacher.urls} both say where the teacher runs; "
        "remove one of them",
    )
    check_rule(
        not teacher.engines or generator.run_engines_locally,
        f"{setting}.engines={teacher.engines} starts engines of generator.backend, but "
        "generator.run_engines_locally=false starts no engines; list servers in urls, or remove engines",
    )
    check_rule(
        not (teacher.engines and placement.colocate_all and placement.device == "cuda"),
        f"{setting}.engines={teacher.engines} needs dedicated GPUs, but trainer.placement.colocate_all=true shares "
        "all GPUs; remove engines (the teacher then time-shares devices with the policy), list a server in urls, or "
        "set colocate_all=false",
    )
