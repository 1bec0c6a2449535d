"""Limits of stages: numbers of trajectories at a time, and their order."""

import asyncio

import pytest

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dispatcher.limits import PrioritySemaphore
from skyrl_agent.dispatcher.plan import plan_of
from skyrl_agent.errors import ConfigError

from .staged_trajectory import PLANS, Staged, World, dispatched, section


def batch(world: World, instances: int, of_each: int, **acts) -> list[Staged]:
    return [Staged(world, chr(97 + i), n, **acts) for i in range(instances) for n in range(of_each)]


def test_pipeline_respects_stage_limits_and_overlaps_stages():
    world = World()
    trajectories = batch(world, 6, 4, initialize=[2.0], generate=[4.0], evaluate=[1.0])
    ended, dispatch, seconds = dispatched(lambda: Dispatch(section("async_pipeline", agents=3, judges=1)), trajectories)
    assert len(ended) == 24 and all(t.result.reward == 1.0 for t in ended)
    assert world.peak["initialize"] == 3 and world.peak["generate"] == 3 and world.peak["evaluate"] == 1
    # 24 x 4 s of generating in 3 slots, which are never empty: 32 s; 2 s before the first, 3 s to judge the last three
    assert seconds == 2 + 32 + 3
    assert dispatch.metrics()["dispatcher/generate/utilisation"] == pytest.approx(32 / 37)


def test_bounded_batch_holds_slot_through_all_stages():
    world = World()
    _, _, seconds = dispatched(
        lambda: Dispatch(section("async_batch_bounded", agents=3)),
        batch(world, 6, 4, initialize=[2.0], generate=[4.0], evaluate=[1.0]),
    )
    assert world.peak["open"] == 3
    assert seconds == 24 * 7 / 3


def test_unlimited_batch_duration_equals_longest_trajectory():
    world = World()
    _, _, seconds = dispatched(lambda: Dispatch(section("async_batch", agents=1)), batch(world, 6, 4))
    assert world.peak["open"] == 24 and seconds == 3


@pytest.mark.parametrize("queue", [0, 1, 5])
def test_initialized_runtimes_are_bounded_before_slow_stage(queue):
    world = World()
    limits = {"initialize": {"parallel": 2}, "generate": {"parallel": 3, "queue": queue}}
    limits["evaluate"] = {"parallel": 1, "queue": 2}
    slow_judge = batch(world, 10, 4, initialize=[0.1], generate=[1.0], evaluate=[10.0])
    _, dispatch, _ = dispatched(lambda: Dispatch(section("async_pipeline", **limits)), slow_judge)
    assert world.peak["open"] == 2 + queue + 3 + 2 + 1  # reached, and not passed
    assert dispatch.metrics()["dispatcher/peak_alive"] == world.peak["open"]


@pytest.mark.parametrize(
    ("settings", "order"),
    [({}, ["a0", "b0", "c0", "a1", "b1", "c1"]), ({"order": "instances"}, ["a0", "a1", "b0", "b1", "c0", "c1"])],
)
def test_order_is_by_instance_or_by_trajectory(settings, order):
    world = World()
    dispatched(lambda: Dispatch(section("async_pipeline", agents=1, judges=1, **settings)), batch(world, 3, 2))
    for stage in ("initialize", "generate", "evaluate"):
        assert [name for begun, name in world.began if begun == stage] == order


@pytest.mark.parametrize("type_name", PLANS)
def test_repeated_run_has_same_order(type_name):
    worlds = [World(), World()]
    for world in worlds:
        trajectories = [
            Staged(world, chr(97 + i), n, generate=[(i * 7 + n * 3) % 5 + 0.5]) for i in range(8) for n in range(3)
        ]
        dispatched(lambda: Dispatch(section(type_name, agents=3, judges=2)), trajectories)
    assert worlds[0].began == worlds[1].began


def test_stage_seconds_separate_waiting_from_working():
    world = World()
    first, second = batch(world, 2, 1, initialize=[2.0], generate=[4.0], evaluate=[1.0])
    dispatched(lambda: Dispatch(section("async_pipeline", agents=1)), [first, second])
    assert first.result.stage_seconds == {
        **{"queue_initialize": 0, "initialize": 2, "queue_generate": 0, "generate": 4},
        **{"queue_evaluate": 0, "evaluate": 1},
    }
    assert second.result.stage_seconds["queue_initialize"] == 2
    assert second.result.stage_seconds["queue_generate"] == 2  # from second 4, when it was ready, to 6


def test_metrics_of_single_trajectory():
    _, dispatch, _ = dispatched(
        lambda: Dispatch(section("async_pipeline", agents=1)), [Staged(World(), initialize=[2.0], generate=[7.0])]
    )
    metrics = dispatch.metrics()
    assert metrics["dispatcher/seconds"] == 10 and metrics["dispatcher/peak_alive"] == 1
    for name in ("mean", "p50", "p95", "max"):
        assert metrics[f"dispatcher/generate/seconds_{name}"] == 7
        assert metrics[f"dispatcher/generate/queue_seconds_{name}"] == 0
    assert metrics["dispatcher/generate/utilisation"] == 0.7


@pytest.mark.slow
def test_two_thousand_concurrent_trajectories_finish():
    world = World()
    trajectories = batch(world, 20, 100, initialize=[20.0], generate=[100.0], evaluate=[30.0])
    ended, _, seconds = dispatched(lambda: Dispatch(section("async_pipeline", 2000, 2000)), trajectories)
    assert len(ended) == 2000 and seconds == 150 and world.peak["open"] == 2000


def test_empty_batch_ends_immediately():
    assert dispatched(lambda: Dispatch(section("async_fix_pool")), [])[0] == []


def test_dispatch_cannot_be_reused():
    async def twice() -> None:
        dispatch = Dispatch(section("async_batch"))
        for _ in range(2):
            _ = [t async for t in dispatch.run([Staged(World())])]

    with pytest.raises(RuntimeError, match="create a new one"):
        virtual_time.run(twice())


def test_evaluation_batches_have_separate_limits():
    given = DispatcherSection.model_validate(
        {"max_parallel_agents": 8, "max_eval_parallel_agents": 6, "val_config": {"max_parallel_agents": 3}}
    )
    training, evaluation = plan_of(given), plan_of(given, val_mode=True)
    assert (training.generate.parallel, training.evaluate.parallel) == (8, 6)
    assert (evaluation.generate.parallel, evaluation.evaluate.parallel) == (3, 6)


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"type": "async_pipelin"}, "async_pipeline"),
        ({"type": "zzz"}, "async_batch"),
        ({"type": "async_batch", "num_environments": 2}, "async_fix_pool"),
        ({"type": "async_batch_bounded", "max_alive": 2}, "async_pipeline"),
        ({"type": "async_batch", "generate": {"queue": 2}}, "set dispatcher.generate.parallel"),
        ({"type": "async_pipeline", "initialize": {"queue": 2}}, "all trajectories wait in this stage from the start"),
    ],
)
def test_contradictory_settings_are_rejected(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Dispatch(DispatcherSection.model_validate(settings))


def test_slot_granted_to_cancelled_waiter_passes_to_next():
    async def story() -> list[str]:
        slots, got = PrioritySemaphore(1), []

        async def take(name: str) -> None:
            await slots.acquire(lambda: 0)
            got.append(name)

        await take("holder")
        first, _second = (asyncio.create_task(take(name)) for name in ("first", "second"))
        await asyncio.sleep(0)
        slots.release()  # to the first, who does not know yet
        first.cancel()
        await asyncio.sleep(1)
        return got

    assert virtual_time.run(story()) == ["holder", "second"]


def test_waiters_are_sorted_lazily_and_served_by_priority():
    num, reads = 512, 0

    async def story() -> list[int]:
        slots, served, sign = PrioritySemaphore(1), [], 1

        async def take(number: int) -> None:
            def priority() -> int:
                nonlocal reads
                reads += 1
                return sign * number

            await slots.acquire(priority)
            served.append(number)

        await slots.acquire(lambda: 0)
        async with asyncio.TaskGroup() as tasks:
            for number in range(num):
                tasks.create_task(take(number))
            await asyncio.sleep(0)
            sign = -1  # now the last one comes first
            for _ in range(num):
                slots.update_order()
                slots.release()
                await asyncio.sleep(0)
        return served

    served = virtual_time.run(story())
    turn = served.index(num - 1)
    assert 0 < turn <= num // 8
    assert served == [*range(turn), *range(num - 1, turn - 1, -1)]
    assert reads < 16 * num


def test_dispatch_runs_with_real_clock():
    world = World()
    trajectories = batch(world, 3, 2, initialize=[0.01], generate=[0.02], evaluate=[0.01])

    async def story() -> dict[str, float]:
        dispatch = Dispatch(section("async_pipeline", agents=2))
        assert len([t async for t in dispatch.run(trajectories)]) == 6
        return dispatch.metrics()

    assert asyncio.run(story())["dispatcher/generate/seconds_max"] >= 0.02
