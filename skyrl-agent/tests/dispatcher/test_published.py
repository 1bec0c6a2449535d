"""Dispatchers as functions, by the published convention, and those that users register; the progress bar."""

import asyncio
import sys
from io import StringIO

import pytest

from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dispatcher.dispatchers import DISPATCHER_REGISTRY, register_dispatcher

from .staged_trajectory import PLANS, Staged, World, section

METHODS = {"init_fn": "prepare", "run_fn": "play", "eval_fn": "judge"}


class Plain:
    """Three methods and a dict: all that the convention asks for."""

    def __init__(self, fails_in: str = "") -> None:
        self.result: dict = {}
        self.fails_in = fails_in
        self.done: list[str] = []

    async def step(self, name: str) -> None:
        await asyncio.sleep(1)
        if name == self.fails_in:
            raise ValueError(f"a bug in {name}")
        self.done.append(name)

    async def prepare(self) -> None:
        await self.step("prepare")

    async def play(self) -> None:
        await self.step("play")

    async def judge(self) -> None:
        await self.step("judge")


@pytest.mark.parametrize("type_name", PLANS)
@pytest.mark.parametrize("nested", [False, True], ids=["list", "table"])
def test_plain_objects_are_dispatched_by_method_names(type_name, nested):
    bad, *good = all_four = [Plain("play"), Plain(), Plain(), Plain()]
    batch = {"x": {0: bad, 1: good[0]}, "y": {0: good[1], 1: good[2]}} if nested else all_four
    cfg = {"max_parallel_agents": 2, "max_eval_parallel_agents": 2, "num_instances": 2, "num_trajectories": 2}
    virtual_time.run(DISPATCHER_REGISTRY[type_name](cfg, batch, **METHODS))  # pyright: ignore[reportArgumentType]
    assert all(plain.done == ["prepare", "play", "judge"] for plain in good)
    assert bad.done == ["prepare"]
    assert bad.result == {"finish_reason": "error_runtime", "error": "ValueError: a bug in play"}


def test_fixed_pool_lends_configured_environments():
    world = World()
    trajectories = [Staged(world, name) for name in "abc"]
    dispatch = DISPATCHER_REGISTRY["async_fix_pool"]
    virtual_time.run(dispatch({"envs": ["red", "blue"]}, trajectories))  # pyright: ignore[reportArgumentType]
    assert world.environments == [("a0", "red"), ("b0", "blue"), ("c0", "red")]


@pytest.fixture
def one_by_one():
    @register_dispatcher("one_by_one")
    async def dispatch(cfg, trajectories, init_fn, run_fn, eval_fn):
        assert cfg["num_instances"] == 2 and cfg["num_trajectories"] == 2 and cfg["max_parallel_agents"] == 7
        for trajectory in trajectories:
            for name in (init_fn, run_fn, eval_fn):
                await getattr(trajectory, name)()

    yield
    del DISPATCHER_REGISTRY["one_by_one"]


def test_registered_dispatcher_is_selected_and_trajectories_closed(one_by_one):
    world = World()
    trajectories = [Staged(world, name, n) for name in "ab" for n in range(2)]

    async def story() -> list[Staged]:
        return [t async for t in Dispatch(section("one_by_one", agents=7)).run(trajectories)]

    ended = virtual_time.run(story())
    assert [t.name for t in ended] == ["a0", "b0", "a1", "b1"]
    assert world.peak["open"] == 4 and world.now_in["open"] == 0
    assert all(t.result.reward == 1.0 for t in ended)


def test_built_in_dispatcher_names_are_reserved():
    with pytest.raises(ValueError, match="built in"):
        register_dispatcher("async_batch")(None)  # pyright: ignore[reportArgumentType]


def test_progress_bar_shows_stages_and_failures(monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := StringIO())
    trajectories = [Staged(World(), "a"), Staged(World(), "b", generate=[ValueError("a bug")])]

    async def story() -> None:
        async for _ in Dispatch(section("async_pipeline", progress=True)).run(trajectories):
            pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(story())
    assert "2/2" in written.getvalue() and "failed 1" in written.getvalue()


def test_virtual_time_loop_reports_deadlock():
    async def skip_waiting() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(skip_waiting())
