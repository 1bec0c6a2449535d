"""Plans: limits of the scheduler by `dispatcher.type`. Runs nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from skyrl_agent.config.task_file import DispatcherSection, DispatcherValSection, StageLimits
from skyrl_agent.errors import ConfigError
from skyrl_agent.types import Stage
from skyrl_gym.suggestions import did_you_mean

STAGES: tuple[Stage, ...] = ("initialize", "generate", "evaluate")

NO_LIMITS = StageLimits()

DEFAULTS: dict[Stage, StageLimits] = {
    "initialize": StageLimits(timeout_seconds=1800.0, retries=2),
    "generate": StageLimits(timeout_seconds=7200.0, retries=1),
    "evaluate": StageLimits(timeout_seconds=3600.0, retries=2),
}


@dataclass(frozen=True)
class Plan:
    """Limits of each stage, and of open trajectories. None: no limit.

    Args:
        alive: maximum number of trajectories between the begin of `initialize` and the end of `close`.
        reuses_environments: a pool of `alive` environments serves all trajectories.
        is_sized: `parallel` of each stage is where automatic sizing begins.
    """

    initialize: StageLimits = NO_LIMITS
    generate: StageLimits = NO_LIMITS
    evaluate: StageLimits = NO_LIMITS
    alive: int | None = None
    reuses_environments: bool = False
    is_sized: bool = False

    def limits(self, stage: Stage) -> StageLimits:
        """Return the limits of a stage."""
        return {"initialize": self.initialize, "generate": self.generate, "evaluate": self.evaluate}[stage]


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "auto": lambda agents, judges: Plan(
        initialize=StageLimits(parallel=agents),
        generate=StageLimits(parallel=agents, queue=0),
        evaluate=StageLimits(parallel=judges),
        is_sized=True,
    ),
    "async_batch": lambda agents, judges: Plan(),
    "async_batch_bounded": lambda agents, judges: Plan(alive=agents),
    "async_fix_pool": lambda agents, judges: Plan(alive=agents, reuses_environments=True),
    "async_pipeline": lambda agents, judges: Plan(
        initialize=StageLimits(parallel=agents),
        generate=StageLimits(parallel=agents, queue=0),
        evaluate=StageLimits(parallel=judges, queue=agents),
    ),
}
"""`dispatcher.type` -> (max_parallel_agents, max_eval_parallel_agents) -> plan.

In the pipeline an initialized trajectory waits in its initialize slot, so at most `agents` runtimes are idle. A
generated one has released its runtime and waits in a queue, so a slow evaluation does not keep the model waiting.
`auto` is a pipeline whose limits grow with what it measures."""


def plan_of(section: DispatcherSection, val_mode: bool = False) -> Plan:
    """Return the plan of `section.type`, overridden by the section's stages, with `DEFAULTS` for the rest.

    Raises:
        ConfigError: a limit has no effect.
    """
    plan = PLANS[section.type](*get_parallel_agents(section, val_mode).values())
    if section.num_environments and not plan.reuses_environments:
        raise ConfigError(
            f"dispatcher.num_environments={section.num_environments} has an effect only with async_fix_pool; "
            f"dispatcher.type is {section.type}"
        )
    if section.max_alive and section.type not in ("auto", "async_pipeline"):
        raise ConfigError(
            f"dispatcher.max_alive={section.max_alive} has an effect only with auto and async_pipeline; "
            f"dispatcher.type is {section.type}, which uses max_parallel_agents"
        )
    return replace(
        plan,
        initialize=_merge_val_config("initialize", plan.initialize, section.initialize),
        generate=_merge_val_config("generate", plan.generate, section.generate),
        evaluate=_merge_val_config("evaluate", plan.evaluate, section.evaluate),
        alive=section.num_environments or section.max_alive or plan.alive,
    )


def get_parallel_agents(section: DispatcherSection, val_mode: bool) -> dict[str, int]:
    """Return `max_parallel_agents` and `max_eval_parallel_agents`, in this order."""
    val = section.val_config if val_mode else DispatcherValSection()
    return {
        "max_parallel_agents": val.max_parallel_agents or section.max_parallel_agents,
        "max_eval_parallel_agents": val.max_eval_parallel_agents or section.max_eval_parallel_agents,
    }


def build_unknown_type_error(name: str, known: Iterable[str]) -> ConfigError:
    """Build the error of an unknown `dispatcher.type`."""
    return ConfigError(f"dispatcher.type={name!r} is unknown; {did_you_mean(name, known)}")


def _merge_val_config(stage: Stage, by_type: StageLimits, by_user: StageLimits) -> StageLimits:
    layers = (DEFAULTS[stage], by_type, by_user)
    limits = StageLimits(**{k: v for layer in layers for k, v in layer.model_dump(exclude_none=True).items()})
    if limits.queue is not None and (stage == "initialize" or limits.parallel is None):
        why = (
            "all trajectories wait in this stage from the start" if stage == "initialize" else "the stage has no limit"
        )
        raise ConfigError(
            f"dispatcher.{stage}.queue={limits.queue} has no effect: {why}; remove it"
            + ("" if stage == "initialize" else f", or set dispatcher.{stage}.parallel")
        )
    return limits
