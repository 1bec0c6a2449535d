"""Trajectories whose stages take seconds, raise or hang as told, and the world that sees what they do."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.config.task_file import DispatcherSection, read_task
from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dispatcher.plan import PLANS, STAGES
from skyrl_agent.finish import FINISH
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.types import Stage

__all__ = ["PLANS", "STAGES"]

CFG = read_task({"task": "any.Task"})

Act = float | BaseException | Callable[["Staged"], Awaitable[None]]
"""Action of a stage: seconds to take, an exception to raise, or a function to await."""


@dataclass
class World:
    """Counts of open runtimes and of trajectories by stage, current and maximum."""

    now_in: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    began: list[tuple[Stage, str]] = field(default_factory=list)
    """(stage, name of the trajectory), in order."""
    ended: Counter[str] = field(default_factory=Counter)
    closed: Counter[str] = field(default_factory=Counter)
    environments: list[tuple[str, object]] = field(default_factory=list)
    """(name, what it was lent) at each begin of `initialize`."""

    def enter(self, what: str) -> None:
        self.now_in[what] += 1
        self.peak[what] = max(self.peak[what], self.now_in[what])

    def leave(self, what: str) -> None:
        self.now_in[what] -= 1

    @contextmanager
    def inside(self, what: str):
        self.enter(what)
        try:
            yield
        finally:
            self.leave(what)


class Staged(BaseTrajectory):
    """Trajectory whose runtime is open from the beginning of `initialize` to `close`."""

    def __init__(
        self, world: World, instance: str = "a", trajectory_id: int = 0, close: Act = 0.0, **acts: list[Act]
    ) -> None:
        super().__init__(CFG, Instance({}, instance), trajectory_id, None, None, BaseTask(), {})  # pyright: ignore
        self.world, self.closing = world, close
        self.name = f"{instance}{trajectory_id}"
        self.acts = {stage: list(acts.get(stage, [1.0])) for stage in STAGES}
        self.open = False

    async def initialize_trajectory(self) -> None:
        assert not self.open, "it was not closed before it began anew"
        self.open = True
        self.world.enter("open")
        self.world.environments.append((self.name, self.environment))
        await self.act("initialize")

    async def generate_trajectory(self) -> None:
        await self.act("generate")
        self.result.finish_reason = FINISH

    async def evaluate_trajectory(self) -> None:
        await self.act("evaluate")
        self.result.reward = 1.0

    async def act(self, stage: Stage) -> None:
        self.world.began.append((stage, self.name))
        acts = self.acts[stage]
        with self.world.inside(stage):
            await self.do(acts.pop(0) if len(acts) > 1 else acts[0])

    async def do(self, act: Act) -> None:
        if isinstance(act, BaseException):
            raise act
        await (asyncio.sleep(act) if isinstance(act, float | int) else act(self))

    async def close(self) -> None:
        self.world.closed[self.name] += 1
        if self.open:
            await self.do(self.closing)
            self.open = False
            self.world.leave("open")


async def hang(_: Staged) -> None:
    await asyncio.Event().wait()


async def stubborn(_: Staged) -> None:
    """Heeds no cancellation for a thousand seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 1000
    while loop.time() < end:
        try:
            await asyncio.sleep(end - loop.time())
        except asyncio.CancelledError:
            continue


async def cancelled_from_within(_: Staged) -> None:
    raise asyncio.CancelledError


def section(type_name: str, agents: int = 4, judges: int = 4, **settings) -> DispatcherSection:
    return DispatcherSection.model_validate(
        {"type": type_name, "max_parallel_agents": agents, "max_eval_parallel_agents": judges, **settings}
    )


async def left_behind(then: float, check: Callable[[], None] = lambda: None) -> float:
    """Check that no task is left after more seconds, in which abandoned ones end. Returns: the time before."""
    now = asyncio.get_running_loop().time()
    check()
    await asyncio.sleep(then)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return now


def dispatched(
    dispatch_of: Callable[[], Dispatch], trajectories: list[Staged], then: float = 0.0
) -> tuple[list[Staged], Dispatch, float]:
    """Run trajectories in virtual time. Returns: the trajectories in the order in which they ended, the dispatch, the
    duration.
    """

    async def all_of_it() -> tuple[list[Staged], Dispatch, float]:
        dispatch = dispatch_of()
        ended = [trajectory async for trajectory in dispatch.run(trajectories)]
        return ended, dispatch, await left_behind(then)

    return virtual_time.run(all_of_it())


def cancelled(
    dispatch: Dispatch, trajectories: list[Staged], *pauses: float, **afterwards: Any
) -> tuple[list[Staged], float]:
    """Run trajectories and cancel the run after each pause. Returns: those that had ended, the duration."""
    ended: list[Staged] = []

    async def consume() -> None:
        async for trajectory in dispatch.run(trajectories):
            ended.append(trajectory)

    async def story() -> float:
        task = asyncio.create_task(consume())
        for seconds in pauses:
            await asyncio.sleep(seconds)
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        return await left_behind(**{"then": 0.0} | afterwards)

    return ended, virtual_time.run(story())
