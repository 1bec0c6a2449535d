"""Property test over plans, stage times and faults: each trajectory ends once, closed, and nothing runs on."""

import asyncio
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.errors import InfraError
from skyrl_agent.finish import ENDINGS

from .staged_trajectory import PLANS, STAGES, Staged, World, cancelled_from_within, dispatched, hang, section

SOME = settings(derandomize=bool(os.environ.get("CI")))  # there, the same ones every time

ACTS = st.one_of(
    st.floats(0, 30),
    st.integers(0, 3).map(float),  # ties
    st.sampled_from([InfraError("away"), ValueError("a bug"), OSError("full"), hang, cancelled_from_within]),
)
TRAJECTORY = st.fixed_dictionaries({stage: st.lists(ACTS, min_size=1, max_size=3) for stage in STAGES})
LIMITS = st.fixed_dictionaries(
    {"timeout_seconds": st.floats(5, 40), "retries": st.integers(0, 2)},
    optional={"parallel": st.integers(1, 4), "queue": st.integers(0, 3)},
)


@st.composite
def sections(draw):
    type_name = draw(st.sampled_from(sorted(PLANS)))
    stages = {stage: draw(LIMITS) for stage in STAGES}
    for stage, limits in stages.items():
        if stage == "initialize" or (type_name != "async_pipeline" and "parallel" not in limits):
            limits.pop("queue", None)
    agents, judges = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return section(type_name, agents, judges, close_timeout_seconds=5.0, **stages)


@pytest.mark.slow
@settings(SOME, max_examples=60)
@given(given=sections(), acts=st.lists(st.tuples(st.integers(0, 3), TRAJECTORY), min_size=1, max_size=12))
def test_trajectories_end_once_closed_and_within_limits(given, acts):
    world = World()
    trajectories = [
        Staged(world, f"{number}-", index, close=0.5, **stages) for number, (index, stages) in enumerate(acts)
    ]
    ended, dispatch, _ = dispatched(lambda: Dispatch(given), trajectories)

    assert sorted(map(id, ended)) == sorted(map(id, trajectories))
    assert world.now_in["open"] == 0 and all(world.closed[t.name] >= 1 for t in trajectories)
    for trajectory in trajectories:
        assert trajectory.result.finish_reason in ENDINGS
        assert (trajectory.result.reward == 1.0) != trajectory.failed
    room = 0
    for stage in STAGES:
        limits = dispatch.plan.limits(stage)
        assert world.peak[stage] <= dispatch.capacity.slots(stage, len(trajectories))
        waiting = len(trajectories) if limits.queue is None and stage != "initialize" else limits.queue or 0
        room += (limits.parallel or len(trajectories)) + waiting
    assert world.peak["open"] <= min(room, dispatch.plan.alive or len(trajectories))
    metrics = dispatch.metrics()
    assert metrics["dispatcher/failures"] == sum(t.failed for t in trajectories)
    assert metrics["dispatcher/abandoned"] == 0
    assert all(limit.running.used == limit.admitted.used == 0 for limit in dispatch.stages.values())


@settings(SOME, max_examples=50)
@given(
    given=sections(),
    acts=st.lists(TRAJECTORY, min_size=1, max_size=8),
    moment=st.floats(0.01, 60),
    closing=st.floats(0, 4),
)
def test_run_cancelled_at_random_time_closes_everything(given, acts, moment, closing):
    world = World()
    trajectories = [Staged(world, f"{number}-", close=closing, **stages) for number, stages in enumerate(acts)]
    dispatch = Dispatch(given)

    async def consume() -> None:
        async for _ in dispatch.run(trajectories):
            pass

    async def story() -> None:
        task = asyncio.create_task(consume())
        await asyncio.wait({task}, timeout=moment)
        task.cancel()
        await asyncio.wait({task})
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(story())
    assert world.now_in["open"] == 0 and all(world.closed[t.name] >= 1 for t in trajectories)
    assert all(limit.running.used == limit.admitted.used == 0 for limit in dispatch.stages.values())
    assert dispatch.alive == 0
