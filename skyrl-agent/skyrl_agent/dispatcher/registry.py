"""Dispatchers that users add, by name. Imports no scheduler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from skyrl_agent.dispatcher.life import Trajectory
from skyrl_agent.dispatcher.plan import PLANS
from skyrl_agent.dispatcher.waits import to_the_end
from skyrl_agent.types import Stage

T = TypeVar("T", bound=Trajectory)

Dispatcher = Callable[..., Awaitable[Any]]
"""`await fn(cfg, trajectories, init_fn=..., run_fn=..., eval_fn=...)` calls three methods of each trajectory, by their
names and without arguments. `cfg`: max_parallel_agents, max_eval_parallel_agents, num_instances, num_trajectories."""

DISPATCHER_REGISTRY: dict[str, Dispatcher] = {}
"""`dispatcher.type` -> dispatcher. Those of `plan.PLANS` are put in by `dispatchers`."""


def register_dispatcher(name: str) -> Callable[[Dispatcher], Dispatcher]:
    """For a type with code of its own; one that only has other limits is a line in `plan.PLANS`.

    A registered dispatcher contains no exceptions unless it does so itself; `close` is called for it.

    Raises:
        ValueError: the name is one of ours.
    """

    def register(dispatcher: Dispatcher) -> Dispatcher:
        if name in PLANS:
            raise ValueError(f"dispatcher {name!r} is built in: choose another name")
        DISPATCHER_REGISTRY[name] = dispatcher
        return dispatcher

    return register


async def run_registered(
    dispatcher: Dispatcher,
    limits: Mapping[str, int],
    trajectories: Sequence[T],
    methods: Mapping[Stage, str],
    close: Callable[[Trajectory], Awaitable[None]],
) -> AsyncIterator[T]:
    """Yields the trajectories when the dispatcher has done with all."""
    of_each = len({trajectory.trajectory_id for trajectory in trajectories})
    cfg = {
        "num_trajectories": of_each,
        "num_instances": len(trajectories) // max(of_each, 1),
        **limits,
    }
    names = {"init_fn": methods["initialize"], "run_fn": methods["generate"], "eval_fn": methods["evaluate"]}

    async def close_all() -> None:
        await asyncio.gather(*(close(trajectory) for trajectory in trajectories))

    try:
        await dispatcher(cfg, trajectories, **names)
    finally:
        await to_the_end(close_all())
    for trajectory in trajectories:
        yield trajectory
