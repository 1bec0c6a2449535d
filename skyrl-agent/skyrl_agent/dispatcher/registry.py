"""Registry of users' dispatchers. Imports no scheduler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from skyrl_agent.dispatcher.plan import PLANS
from skyrl_agent.dispatcher.trajectory_state import Trajectory
from skyrl_agent.dispatcher.waits import wait_despite_cancellation
from skyrl_agent.types import Stage

T = TypeVar("T", bound=Trajectory)

Dispatcher = Callable[..., Awaitable[object]]
"""`await fn(cfg, trajectories, init_fn=..., run_fn=..., eval_fn=...)` calls three methods of each trajectory, by their
names and without arguments. `cfg`: max_parallel_agents, max_eval_parallel_agents, num_instances, num_trajectories."""

DISPATCHER_REGISTRY: dict[str, Dispatcher] = {}
"""`dispatcher.type` -> dispatcher. Those of `plan.PLANS` are put in by `dispatchers`."""


def register_dispatcher(name: str) -> Callable[[Dispatcher], Dispatcher]:
    """Register a custom dispatcher type. A type that differs only in limits is a line in `plan.PLANS`.

    A registered dispatcher handles exceptions itself; `close` is called for it.

    Raises:
        ValueError: the name is built in.
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
    """Yield the trajectories after the dispatcher has finished all."""
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
        await wait_despite_cancellation(close_all())
    for trajectory in trajectories:
        yield trajectory
