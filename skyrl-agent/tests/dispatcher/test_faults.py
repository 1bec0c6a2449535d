"""Whatever happens to one trajectory, the others do not notice, and everything is closed."""

import asyncio
import logging
from contextlib import aclosing

import pytest

from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.errors import InfraError
from skyrl_agent.finish import CANCELLED, ERROR_AGENT, ERROR_EVALUATION, ERROR_RUNTIME, FINISH, NO_GIT_PATCH

from .staged_trajectory import (
    PLANS,
    STAGES,
    Staged,
    World,
    cancelled,
    cancelled_from_within,
    dispatched,
    hang,
    section,
    stubborn,
)

EVERY_PLAN = pytest.mark.parametrize("type_name", PLANS)
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)
DEADLINES = {stage: {"timeout_seconds": 50.0} for stage in STAGES}
GRACE = {"close_timeout_seconds": 10.0}


def beside_seven(world: World, **acts) -> tuple[Staged, list[Staged]]:
    """One as told, third of eight, and the other seven."""
    all_eight = [Staged(world, "abcdefgh"[i], **(acts if i == 2 else {})) for i in range(8)]
    return all_eight[2], all_eight[:2] + all_eight[3:]


def check_the_others(world: World, others: list[Staged]) -> None:
    assert [t.result.reward for t in others] == [1.0] * 7
    assert not any(t.failed for t in others)
    assert world.now_in["open"] == 0 and all(world.closed[t.name] == 1 for t in others)


@EVERY_PLAN
@EVERY_STAGE
@pytest.mark.parametrize(
    "act, kind, reason, attempts",
    [
        (ValueError("a bug"), None, None, 1),
        (InfraError("the daemon is away"), "infrastructure", ERROR_RUNTIME, {"generate": 2}),
        (OSError(28, "no space left on device"), "infrastructure", ERROR_RUNTIME, 1),
        (hang, "infrastructure", ERROR_RUNTIME, 1),
        (cancelled_from_within, "infrastructure", ERROR_RUNTIME, {"generate": 2}),
    ],
    ids=["exception", "outage", "full disk", "hang", "library cancels"],
)
def test_fault_ends_only_affected_trajectory(type_name, stage, act, kind, reason, attempts):
    world = World()
    faulty, others = beside_seven(world, **{stage: [act]})
    ended, dispatch, seconds = dispatched(lambda: Dispatch(section(type_name, **DEADLINES)), [faulty, *others])
    assert len(ended) == 8 and seconds < 200
    check_the_others(world, others)
    failure = faulty.result.failure
    assert failure.stage == stage
    assert failure.kind == (kind or ("reward" if stage == "evaluate" else "environment"))
    assert failure.attempts == (attempts if isinstance(attempts, int) else attempts.get(stage, 3))
    assert faulty.result.finish_reason == (ERROR_EVALUATION if stage == "evaluate" else reason or ERROR_AGENT)
    assert faulty.result.reward is None
    assert world.closed[faulty.name] >= 1
    later = STAGES[STAGES.index(stage) + 1 :]
    assert not any((skipped, faulty.name) in world.began for skipped in later)
    assert dispatch.metrics()[f"dispatcher/{stage}/failures"] == 1


@EVERY_PLAN
@EVERY_STAGE
def test_stage_ignoring_cancellation_is_abandoned(type_name, stage, caplog):
    world = World()
    faulty, others = beside_seven(world, **{stage: [stubborn]})
    given = section(type_name, **DEADLINES, **GRACE)
    ended, dispatch, seconds = dispatched(lambda: Dispatch(given), [faulty, *others], then=1000)
    assert len(ended) == 8 and seconds < 100
    assert dispatch.metrics()["dispatcher/abandoned"] == 1
    assert dispatch.metrics()[f"dispatcher/{stage}/timeouts"] == 1
    assert f"dispatcher.{stage}.timeout_seconds" in faulty.result.failure.message
    assert "ignored its cancellation" in caplog.text
    check_the_others(world, others)


@EVERY_PLAN
def test_slow_trajectory_does_not_delay_others(type_name):
    world = World()
    slow, others = beside_seven(world, generate=[1000.0])
    ended, _, seconds = dispatched(lambda: Dispatch(section(type_name)), [slow, *others])
    assert ended[-1] is slow and slow.result.reward == 1.0
    assert seconds == 1002
    assert max(sum(t.result.stage_seconds.values()) for t in others) < 15


@EVERY_PLAN
def test_transient_outage_is_retried(type_name):
    world = World()
    away = InfraError("away")
    once, others = beside_seven(
        world, initialize=[away, away, 1.0], generate=[away, 1.0], evaluate=[away, 1.0], close=0.5
    )
    _, dispatch, _ = dispatched(lambda: Dispatch(section(type_name)), [once, *others])
    assert once.result.reward == 1.0 and not once.failed and once.result.finish_reason == FINISH
    stages = [stage for stage, name in world.began if name == once.name]
    assert stages == ["initialize"] * 3 + ["generate", "initialize", "generate", "evaluate", "evaluate"]
    retries = [dispatch.metrics()[f"dispatcher/{stage}/retries"] for stage in STAGES]
    assert retries == [2, 1, 1]
    check_the_others(world, others)


def test_restarting_trajectory_releases_slots():
    world = World()
    again = Staged(world, "a", generate=[InfraError("away"), 1.0])
    other = Staged(world, "b")
    limits = {"initialize": {"parallel": 1}, "generate": {"parallel": 1, "queue": 0}}
    ended, _, _ = dispatched(lambda: Dispatch(section("async_pipeline", **limits)), [again, other])
    assert ended == [other, again] and again.result.reward == 1.0


def test_many_restarts_do_not_deadlock():
    world = World()
    flaky = [Staged(world, "a", n, generate=[InfraError("away"), 1.0]) for n in range(40)]
    tight = {"initialize": {"parallel": 1}, "generate": {"parallel": 1, "queue": 0}, "evaluate": {"parallel": 1}}
    ended, _, _ = dispatched(lambda: Dispatch(section("async_pipeline", **tight)), flaky)
    assert len(ended) == 40 and all(t.result.reward == 1.0 for t in ended)
    assert all(world.closed[t.name] == 2 for t in flaky)


def test_evaluation_is_skipped_when_disabled():
    class NoPatch(Staged):
        async def generate_trajectory(self) -> None:
            self.result.finish_reason = NO_GIT_PATCH

    world = World()
    dispatched(lambda: Dispatch(section("async_pipeline")), [NoPatch(world)])
    assert [stage for stage, _ in world.began] == ["initialize"] and world.closed["a0"] == 1


@EVERY_PLAN
@pytest.mark.parametrize("closing", [hang, stubborn, ValueError("a bug in close")], ids=["hang", "stubborn", "raises"])
def test_failed_close_is_logged_and_does_not_block(type_name, closing, caplog):
    world = World()
    faulty, others = beside_seven(world, close=closing)
    with caplog.at_level(logging.WARNING):
        given = section(type_name, **GRACE)
        ended, _, seconds = dispatched(lambda: Dispatch(given), [faulty, *others], then=1000)
    assert len(ended) == 8 and seconds < 100
    assert faulty.result.reward == 1.0  # it had done its work
    assert "closing a trajectory" in caplog.text
    assert [t.result.reward for t in others] == [1.0] * 7


@EVERY_PLAN
@pytest.mark.parametrize("moment", [0.1, 0.5, 1.0, 1.5, 2.5, 3.1])
def test_cancelling_run_closes_everything(type_name, moment):
    world = World()
    trajectories = [Staged(world, "abcdefghi"[i], close=0.2) for i in range(9)]
    ended, seconds = cancelled(Dispatch(section(type_name, agents=3, judges=2)), trajectories, moment)
    assert seconds <= moment + 0.2
    assert world.now_in["open"] == 0
    assert all(world.closed[t.name] >= 1 for t in trajectories)
    assert {t.result.finish_reason for t in trajectories} <= {FINISH, CANCELLED}
    assert all(t.result.reward == 1.0 for t in ended)


def test_cancelling_twice_still_closes_everything():
    world = World()
    trajectories = [Staged(world, "abcdef"[i], close=5.0) for i in range(6)]
    cancelled(Dispatch(section("async_pipeline")), trajectories, 1.5, 1.0, 1.0)
    assert world.now_in["open"] == 0


@EVERY_STAGE
def test_cancelling_does_not_wait_for_uncancellable_stage(stage):
    world = World()
    trajectories = [Staged(world, "a", **{stage: [stubborn]}), Staged(world, "b", **{stage: [hang]})]

    def all_are_cancelled() -> None:
        assert {t.result.finish_reason for t in trajectories} == {CANCELLED}

    dispatch = Dispatch(section("async_batch", **GRACE))
    assert cancelled(dispatch, trajectories, 5, then=1000, check=all_are_cancelled)[1] == 15
    assert world.now_in["open"] == 0


@EVERY_PLAN
def test_leaving_stream_early_cancels_and_closes_remaining(type_name):
    world = World()
    trajectories = [Staged(world, "abcdefghi"[i], generate=[1.0 + i]) for i in range(9)]

    async def story() -> Staged:
        async with aclosing(Dispatch(section(type_name, agents=3)).run(trajectories)) as stream:
            first = await anext(stream)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return first

    first = virtual_time.run(story())
    assert first is trajectories[0] and first.result.reward == 1.0
    assert world.now_in["open"] == 0 and all(world.closed[t.name] >= 1 for t in trajectories)
    assert {t.result.finish_reason for t in trajectories[1:]} == {CANCELLED}


def test_finished_trajectories_are_yielded_while_others_run():
    async def story() -> list[float]:
        trajectories = [Staged(World(), "abc"[i], generate=[10.0 * (3 - i)]) for i in range(3)]
        loop = asyncio.get_running_loop()
        return [loop.time() async for _ in Dispatch(section("async_pipeline")).run(trajectories)]

    assert virtual_time.run(story()) == [12, 22, 32]
