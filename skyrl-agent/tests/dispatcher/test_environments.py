"""A fixed pool of environments: lent for a life, replaced when they may be broken, closed at the end."""

import asyncio

import pytest

from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.errors import InfraError

from .staged_trajectory import Staged, World, cancelled, dispatched, hang, section, stubborn


class Machines:
    """Makes and closes them; each is its number and which of that number it is."""

    def __init__(self, seconds: float = 0.0, failures: int = 0) -> None:
        self.made: list[tuple[int, int]] = []
        self.closed: list[tuple[int, int]] = []
        self.seconds, self.failures = seconds, failures

    async def make(self, place: int) -> tuple[int, int]:
        await asyncio.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise InfraError("no machine to be had")
        self.made.append((place, sum(made[0] == place for made in self.made)))
        return self.made[-1]

    async def close(self, machine: tuple[int, int]) -> None:
        self.closed.append(machine)


def pool(machines: Machines, count: int = 2, **settings) -> Dispatch:
    given = section("async_fix_pool", num_environments=count, **settings)
    return Dispatch(given, make_environment=machines.make, close_environment=machines.close)


def test_environment_serves_single_trajectory_until_it_closes():
    world, machines = World(), Machines()
    trajectories = [Staged(world, "abcdef"[i], generate=[1.0 + i % 2]) for i in range(6)]
    dispatched(lambda: pool(machines), trajectories)
    assert world.peak["open"] == 2
    assert sorted(machines.made) == sorted(machines.closed) == [(0, 0), (1, 0)]
    assert {environment for _, environment in world.environments} == {(0, 0), (1, 0)}
    assert all(t.result.reward == 1.0 for t in trajectories)


def test_environments_do_not_exceed_trajectories():
    machines = Machines()
    dispatched(lambda: pool(machines, count=5), [Staged(World())])
    assert machines.made == [(0, 0)]


def test_default_environment_is_the_index():
    world = World()
    dispatched(lambda: Dispatch(section("async_fix_pool", agents=2)), [Staged(world, name) for name in "abc"])
    assert world.environments == [("a0", 0), ("b0", 1), ("c0", 0)]


@pytest.mark.parametrize("stage", ["initialize", "generate", "evaluate"])
def test_environment_is_replaced_after_infrastructure_failure(stage):
    world, machines = World(), Machines()
    bad = Staged(world, "a", **{stage: [InfraError("its machine is gone")]})
    good = [Staged(world, name) for name in "bc"]
    never = {name: {"retries": 0} for name in ("initialize", "generate", "evaluate")}
    dispatched(lambda: pool(machines, count=1, **never), [bad, *good])
    assert world.environments == [("a0", (0, 0)), ("b0", (0, 1)), ("c0", (0, 1))]
    assert machines.closed == [(0, 0), (0, 1)]


@pytest.mark.parametrize("acts", [{"generate": [ValueError("a bug")]}, {"evaluate": [InfraError("away"), 1.0]}])
def test_environment_is_kept_after_agent_failure_and_grading_retry(acts):
    world, machines = World(), Machines()
    dispatched(lambda: pool(machines, count=1), [Staged(world, "a", **acts), Staged(world, "b")])
    assert machines.made == [(0, 0)]


def test_restarted_trajectory_gets_new_environment():
    world, machines = World(), Machines()
    dispatched(lambda: pool(machines, count=1), [Staged(world, "a", generate=[InfraError("away"), 1.0])])
    assert world.environments == [("a0", (0, 0)), ("a0", (0, 1))]
    assert machines.closed == [(0, 0), (0, 1)]


def test_environment_creation_is_retried():
    machines = Machines(failures=2)
    trajectory = Staged(World())
    dispatched(lambda: pool(machines), [trajectory])
    assert trajectory.result.reward == 1.0 and trajectory.result.stage_seconds["initialize"] > 2


def test_environment_of_abandoned_trajectory_is_closed():
    machines = Machines()

    async def slow_and_stubborn(place: int) -> tuple[int, int]:
        await stubborn(Staged(World()))
        return await machines.make(place)

    late = {"initialize": {"timeout_seconds": 10.0}, "close_timeout_seconds": 5.0}
    given = section("async_fix_pool", num_environments=1, **late)
    ended, _, seconds = dispatched(
        lambda: Dispatch(given, make_environment=slow_and_stubborn, close_environment=machines.close),
        [Staged(World(), "a")],
        then=2000,
    )
    assert ended[0].failed and seconds < 1000, "it was given up before its environment was there"
    assert machines.made == machines.closed == [(0, 0)]


def test_hanging_environment_close_does_not_block_run(caplog):
    async def make(place: int) -> int:
        return place

    given = section("async_fix_pool", num_environments=2, close_timeout_seconds=5.0)
    _, _, seconds = dispatched(
        lambda: Dispatch(given, make_environment=make, close_environment=hang),  # pyright: ignore[reportArgumentType]
        [Staged(World(), name) for name in "abcd"],
    )
    assert seconds == 6 + 5
    assert "its resources may remain" in caplog.text


def test_idle_environments_are_closed_when_run_is_cancelled_twice():
    machines = Machines()
    trajectories = [Staged(World(), "a"), Staged(World(), "b", generate=[hang], close=5.0)]
    cancelled(pool(machines), trajectories, 10, 1, 1)
    assert sorted(machines.made) == sorted(machines.closed) == [(0, 0), (1, 0)]
