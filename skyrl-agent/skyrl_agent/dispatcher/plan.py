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
    """

    initialize: StageLimits = NO_LIMITS
    generate: StageLimits = NO_LIMITS
    evaluate: StageLimits = NO_LIMITS
    alive: int | None = None
    reuses_environments: bool = False

    def limits(self, stage: Stage) -> StageLimits:
        """Return the limits of a stage."""
        return {"initialize": self.initialize, "generate": self.generate, "evaluate": self.evaluate}[stage]

    def slots(self, stage: Stage, total: int) -> int:
        """Return the number of trajectories, of `total`, that can be in a stage at a time."""
        return min(limit for limit in (self.limits(stage).parallel, self.alive, total) if limit is not None)


PLANS: dict[str, Callable[[int, int], Plan]] = {
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
generated one has released its runtime and waits in a queue, so a slow evaluation does not keep the model waiting."""


def plan_of(section: DispatcherSection, val_mode: bool = False) -> Plan:
    """Return the plan of `section.type`, overridden by the section's stages, with `DEFAULTS` for the rest.

    Raises:
        ConfigError: a limit has no effect.
    """
    plan = PLANS[section.type](*parallel_agents(section, val_mode).values())
    if section.num_environments and not plan.reuses_environments:
        raise ConfigError(
            f"dispatcher.num_environments={section.num_environments} is read by async_fix_pool alone; "
            f"dispatcher.type is {section.type}"
        )
    return replace(
        plan,
        initialize=_laid_over("initialize", plan.initialize, section.initialize),
        generate=_laid_over("generate", plan.generate, section.generate),
        evaluate=_laid_over("evaluate", plan.evaluate, section.evaluate),
        alive=section.num_environments or plan.alive,
    )


def parallel_agents(section: DispatcherSection, val_mode: bool) -> dict[str, int]:
    """Return `max_parallel_agents` and `max_eval_parallel_agents`, in this order."""
    val = section.val_config if val_mode else DispatcherValSection()
    return {
        "max_parallel_agents": val.max_parallel_agents or section.max_parallel_agents,
        "max_eval_parallel_agents": val.max_eval_parallel_agents or section.max_eval_parallel_agents,
    }


def unknown_type(name: str, known: Iterable[str]) -> ConfigError:
    """Build the error of an unknown `dispatcher.type`."""
    return ConfigError(f"dispatcher.type={name!r} is not known; {did_you_mean(name, known)}")


def _laid_over(stage: Stage, by_type: StageLimits, by_user: StageLimits) -> StageLimits:
    layers = (DEFAULTS[stage], by_type, by_user)
    limits = StageLimits(**{k: v for layer in layers for k, v in layer.model_dump(exclude_none=True).items()})
    if limits.queue is not None and (stage == "initialize" or limits.parallel is None):
        why = "all trajectories wait there from the start" if stage == "initialize" else "the stage has no limit"
        raise ConfigError(
            f"dispatcher.{stage}.queue={limits.queue} has no meaning: {why}; remove it"
            + ("" if stage == "initialize" else f", or set dispatcher.{stage}.parallel")
        )
    return limits
