"""Automatic sizing, order by expected duration, limit of open trajectories, slots shared by concurrent batches."""

import asyncio
import math

import pytest

from skyrl_agent.dispatcher import durations, virtual_time
from skyrl_agent.dispatcher.capacity import Capacity
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dispatcher.durations import Durations
from skyrl_agent.dispatcher.sizing import StageSize

from .staged_trajectory import Staged, World, dispatched, section
from .traces import FAMILIES, Family, SharedMachine, SharedStage, lower_bound, run_batches

PATIENT = {stage: {"timeout_seconds": 1e6} for stage in ("initialize", "generate", "evaluate")}
FAMILY = {family.name: family for family in FAMILIES}


def seconds_of(family: Family, type_name: str, works, agents: int = 32, **settings) -> float:
    given = section(type_name, agents, agents, **PATIENT, **settings)
    return run_batches(family, given, works)[-1]["dispatcher/seconds"]


def test_open_trajectory_limit_spans_all_stages():
    world = World()
    trajectories = [Staged(world, str(n), initialize=[1.0], generate=[1.0], evaluate=[9.0]) for n in range(12)]
    _, dispatch, seconds = dispatched(lambda: Dispatch(section("async_pipeline", 4, 4, max_alive=3)), trajectories)
    assert world.peak["open"] == dispatch.metrics()["dispatcher/peak_alive"] == 3
    assert seconds == 12 / 3 * 11


def test_longest_predicted_trajectories_start_first():
    """Instances 0 to 5 take 1, 2, 4, 8, 16, 32 s. After sixteen predictions, the last trajectories of the longest go
    first; without them, in the order of the file."""

    def order(**settings) -> list[str]:
        world = World()
        batch = [Staged(world, str(i), n, initialize=[0.0], generate=[2.0**i]) for n in range(6) for i in range(6)]
        dispatched(lambda: Dispatch(section("async_pipeline", 1, 9, **settings)), batch)
        return [name for stage, name in world.began if stage == "generate"][-6:]

    assert order() == ["05", "15", "25", "35", "45", "55"]
    last = order(order="longest_first")
    assert [name[0] for name in last] == sorted(name[0] for name in last)[::-1]


def test_unpredictive_durations_do_not_change_order():
    known = Durations()
    assert known.estimate_remaining("new", "generate") == math.inf
    for number in range(40):
        known.add(number % 4, [0.0, 1.0 + (number // 4 + number) % 2 * 9, 0.0])  # long ones become short
    assert not known.predictive
    for number in range(300):
        known.add(number % 4, [0.0, 1.0 + number % 4, 2.0])
    assert known.predictive
    assert known.estimate_remaining(3, "initialize") == pytest.approx(6.0)
    assert known.estimate_remaining(3, "evaluate") == pytest.approx(2.0)


def test_durations_of_recent_instances_are_kept(monkeypatch):
    monkeypatch.setattr(durations, "MAX_INSTANCES", 2)
    known = Durations()
    for instance in "abac":
        known.add(instance, [1.0, 1.0, 1.0])
    assert [known.estimate_remaining(instance, "generate") for instance in "abc"] == [2.0, math.inf, 2.0]


def test_named_instances_are_recognized_in_next_batch():
    by_name, by_position = (Capacity(section("auto"), named_instances=named) for named in (True, False))
    assert by_name.instance(0, "bug-7") == by_name.instance(1, "bug-7")
    assert by_position.instance(0, "7") != by_position.instance(1, "7")


def test_concurrent_batches_share_slots_in_start_order():
    world = World()
    given = section("async_pipeline", agents=2, judges=2)
    batches = [[Staged(world, name, n, generate=[3.0]) for n in range(4)] for name in "ab"]

    async def story() -> None:
        capacity = Capacity(given)

        async def run(batch: list[Staged]) -> None:
            assert len([t async for t in Dispatch(given, capacity=capacity).run(batch)]) == 4

        await asyncio.gather(*map(run, batches))

    virtual_time.run(story())
    assert world.peak["generate"] == world.peak["initialize"] == 2
    assert [name[0] for stage, name in world.began if stage == "generate"] == ["a"] * 4 + ["b"] * 4


def test_shared_stage_slows_work_above_capacity():
    """Capacity 2: three works of 1, 2 and 3 s advance at 2/3 until the first is done, then at full speed."""

    async def story() -> list[float]:
        stage, ends = SharedStage(lambda n: min(n, 2)), []

        async def work(seconds: float) -> None:
            await stage.work(seconds)
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(*map(work, (1.0, 2.0, 3.0)))
        return ends

    assert virtual_time.run(story()) == pytest.approx([1.5, 2.5, 3.5])


def test_lower_bound_of_small_batches():
    family = Family("test", FAMILIES[0].draw, SharedMachine(starts=9, places=2, graders=9))
    works = [(1.0, 4.0, 2.0)] * 4  # 16 s of generating in two places, behind a start and before an evaluation
    assert lower_bound(family, works) == 8 + 1 + 2
    assert lower_bound(family, [*works, (1.0, 30.0, 2.0)]) == 33


def test_auto_sizing_finds_model_capacity():
    """From 8 trajectories at a time to the 24 places of the model, not to the 192 of the batch."""
    machine = SharedMachine(starts=1000, places=24, graders=1000)
    family = Family("test capacity", FAMILY["search"].draw, machine)
    metrics = run_batches(
        family, section("auto", 8, 8, **PATIENT), [family.batch(seed, instances=24) for seed in (1, 2)]
    )
    assert 20 <= metrics[-1]["dispatcher/generate/slots"] <= 32
    assert metrics[0]["dispatcher/seconds"] > metrics[1]["dispatcher/seconds"]


@pytest.mark.slow
def test_last_trajectories_start_together_when_long_ones_are_likely():
    """One in five takes ten times as long, and siblings tell little of which."""
    family = FAMILY["bimodal"]
    batches = [family.batch(1000), family.batch(1001), family.batch(0, 2)]
    metrics = run_batches(family, section("auto", **PATIENT), batches)[-1]
    assert metrics["dispatcher/seconds"] < 1.2 * lower_bound(family, batches[-1])  # 1.39 without the hedge
    assert metrics["dispatcher/generate/slots"] <= 128  # it ends with the batch


def test_durations_bound_unpredicted_trajectory_length():
    known = Durations()
    for number in range(200):
        known.add(number % 4, [0.0, 10.0, 1.0])
    assert known.longest([0, 1, 2]) == 0.0  # all as their siblings
    for number in range(200):
        known.add(number % 4, [0.0, 100.0 if number % 20 == 0 else 10.0, 1.0])
    assert 40 < known.longest([0, 1, 2] * 100) <= 101.0 + 1e-6  # never more than the longest of late
    assert known.longest(["unknown"]) == 0.0


def test_unused_limit_does_not_grow():
    size = StageSize(32)
    for number in range(200):
        entry = size.started(float(number), pressed=True)
        size.ended(number + 0.5, entry, number)
    assert size.limit == 32
    entries = [size.started(300.0, pressed=True) for _ in range(64)]
    for number, entry in enumerate(entries):
        size.ended(301.0, entry, -number)
    assert size.limit == 64


def test_stage_with_explicit_limit_is_not_sized():
    family = Family("test fixed", FAMILY["search"].draw, SharedMachine())
    given = section("auto", 8, 8, **PATIENT | {"generate": {"timeout_seconds": 1e6, "parallel": 4}})
    [metrics] = run_batches(family, given, [family.batch(1, instances=8)])
    assert metrics["dispatcher/generate/slots"] == 4


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("name", FAMILY)
def test_auto_matches_best_fixed_dispatcher(name):
    """Total time of the third epoch over the same instances."""
    family = FAMILY[name]
    lives = {"max_alive": family.machine.lives} if family.machine.lives else {}
    epochs = [family.batch(0, epoch) for epoch in range(3)]
    auto = run_batches(family, section("auto", **PATIENT, **lives), epochs, named_instances=True)[-1]
    fixed = [seconds_of(family, "async_pipeline", epochs[-1:], agents, **lives) for agents in (32, 64, 128)]
    if not lives:
        fixed += [
            seconds_of(family, "async_batch_bounded", epochs[-1:], 64),
            seconds_of(family, "async_batch", epochs[-1:]),
        ]
    assert auto["dispatcher/seconds"] <= 1.03 * min(fixed)
    assert auto["dispatcher/peak_alive"] <= (family.machine.lives or 512)


def test_stage_below_clock_resolution_is_ignored():
    size = StageSize(4)
    size.started(0.0, pressed=False)
    entries = [size.started(1e9, pressed=False) for _ in range(8)]
    assert not size.ended(1e9 + 1.2e-7, entries[0], "instance")  # at half speed, less than the clocks' last digit


def test_second_batch_ends_hedge_of_first():
    capacity = Capacity(section("auto", 8, 8, **PATIENT))
    for number in range(200):
        capacity.record_durations(0, [0.0, 1000.0 if number % 20 == 0 else 10.0, 1.0])
    capacity.start_batch()
    capacity.update_hedge(waiting=[0, 0], working=[])
    assert capacity.slots("generate", 100) == 32
    capacity.start_batch()
    assert capacity.slots("generate", 100) == 8 and not capacity.may_hedge
