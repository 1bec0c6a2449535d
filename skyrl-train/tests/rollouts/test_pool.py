"""The rollout pool and its journal: every group has a deadline, errors end a run at once, and a kill at any moment
loses no finished group and trains none twice."""

import asyncio
import random
import resource
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_train.errors import AllRolloutsFailedError, CheckpointError, ConfigError, SkyRLError
from skyrl_train.rollouts import pool as pool_module
from skyrl_train.rollouts.journal import RolloutJournal
from skyrl_train.rollouts.pool import RolloutPool
from skyrl_train.rollouts.schedule import ScheduleLimits, ScheduleState
from skyrl_train.rollouts.types import (
    NO_VERSION,
    RolloutBatch,
    TrainingSample,
    Trajectory,
    TrajectoryGroup,
    TrajectoryID,
)

Generate = Callable[[int], Awaitable[RolloutBatch]]
EXPERIMENT = {"trainer.seed": 0}


def limits(**changes: Any) -> ScheduleLimits:
    given: dict[str, Any] = dict(
        groups_per_step=2, max_staleness_steps=1, max_running=4, groups_per_epoch=6, total_steps=6, on_stale="mask"
    )
    return ScheduleLimits(**given | changes)


def group_of(ticket: int, version: int = NO_VERSION, reward: float = 0.5) -> RolloutBatch:
    """A group of two samples whose tokens are of this weight version, or of that of its start."""
    trajectories = [
        Trajectory(
            TrajectoryID(f"prompt-{ticket % 6}", number),
            [TrainingSample([1], [ticket, number], [1, 1], [0.0, reward * number], [-0.1, -1 / 3], [version] * 2)],
            env_metrics={"share": 1 / 7},
        )
        for number in range(2)
    ]
    return RolloutBatch([TrajectoryGroup(f"prompt-{ticket % 6}", trajectories)], {"generate/x": 1 / 3})


async def at_once(ticket: int) -> RolloutBatch:
    await asyncio.sleep(0)
    return group_of(ticket)


@dataclass
class Run:
    """The trainer's side of a pool, which a kill leaves at any moment; a checkpoint every two steps."""

    folder: Path
    limits: ScheduleLimits
    generate: Generate = at_once
    checkpoint: dict[str, Any] = field(default_factory=lambda: ScheduleState().to_json())
    steps: list[list[int]] = field(default_factory=list)
    """Tickets of each step since the start of the run."""
    checkpoint_lag: int = 0
    """Steps from the state of a checkpoint until the checkpoint is complete; 1: it is written beside the training."""
    timeout: float = 10.0
    keep: Callable[[TrajectoryGroup], bool] = lambda group: True
    max_filtered: int | None = None
    version: int = 0

    def pool(self) -> RolloutPool:
        journal = RolloutJournal(self.folder / "journal.jsonl", EXPERIMENT)
        state = ScheduleState.from_json(self.checkpoint)
        del self.steps[state.num_trained_steps :]
        self.version = state.version
        return RolloutPool(
            self.generate,
            self.limits,
            journal.recover(state),
            journal,
            group_timeout_seconds=self.timeout,
            is_kept=self.keep,
            max_filtered=self.max_filtered,
        )

    async def train(self, step: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)) -> None:
        state: dict[str, Any] | None = None
        async with self.pool() as pool:
            while len(self.steps) < self.limits.total_steps:
                groups = await pool.next_batch()
                assert all(len(self.steps) - group.oldest_version >= 0 for group in groups)
                await step()
                pool.record_trained(groups)
                self.steps.append([group.ticket for group in groups])
                await pool.drain()
                self.version = len(self.steps)
                pool.record_synced(self.version)
                if len(self.steps) % 2 == 0:
                    state = pool.state().to_json()
                    await asyncio.sleep(0)
                if len(self.steps) % 2 == self.checkpoint_lag and state is not None:
                    self.checkpoint, state = state, None
                    pool.compact_journal()

    @property
    def trained(self) -> Counter[int]:
        return Counter(ticket for step in self.steps for ticket in step)


@pytest.mark.parametrize("order", ["finished", "oldest", "exact"])
async def test_each_group_is_trained_once(tmp_path: Path, order: str):
    async def generate(ticket: int) -> RolloutBatch:
        await asyncio.sleep(random.Random(ticket).random() / 500)
        return group_of(ticket)

    run = Run(tmp_path, limits(order=order, on_stale="mask"), generate)
    await run.train()
    assert run.trained == Counter(range(12))
    if order == "exact":
        assert run.steps == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


async def test_stale_group_restarts_after_next_sync(tmp_path: Path):
    async def generate(ticket: int) -> RolloutBatch:
        await asyncio.sleep(0 if ticket else 30)
        return group_of(ticket, version=run.version)

    run = Run(tmp_path, limits(order="finished", on_stale="regenerate"), generate)
    async with run.pool() as pool:
        for step in (1, 2):
            pool.record_trained(await pool.next_batch(), sync_follows=True)
            assert (0 in pool.scheduler.running) == (step == 1), "it has become too old, and waits for the sync"
            run.version = step
            pool.record_synced(step)
        assert 0 in pool.scheduler.running and pool.scheduler.age(0) == 0
    recovered = RolloutJournal(tmp_path / "journal.jsonl", EXPERIMENT).recover(ScheduleState())
    assert recovered.state.restarted == {0}, "a resumed run would not know that it was started again"


async def test_fully_stale_group_is_regenerated_under_mask_policy(tmp_path: Path):
    """Its tokens are of the start, and its environment answers two steps later."""
    answered = asyncio.Event()

    async def generate(ticket: int) -> RolloutBatch:
        version = run.version
        await (answered.wait() if ticket == 0 else asyncio.sleep(0))
        return group_of(ticket, version)

    run = Run(tmp_path, limits(order="finished"), generate)
    async with run.pool() as pool:
        for step in (1, 2):
            pool.record_trained(await pool.next_batch())
            run.version = step
            pool.record_synced(step)
        assert pool.take_counts().num_stale == 0 and 0 in pool.scheduler.running, "it may still get younger tokens"
        answered.set()
        groups = await pool.next_batch()
        while 0 not in pool.scheduler.finished_groups:
            await asyncio.sleep(0)
        assert pool.take_counts().num_stale == 1 and pool.scheduler.age(0) == 0
        assert 0 not in [group.ticket for group in groups]
        killed = RolloutJournal(tmp_path / "journal.jsonl", EXPERIMENT).recover(ScheduleState())
    assert killed.state.restarted == {0} and killed.groups[0].oldest_version == 2


async def test_timed_out_group_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one whose generator does not stop when it is cancelled."""
    monkeypatch.setattr(pool_module, "_GRACE_SECONDS", 0.05)

    async def generate(ticket: int) -> RolloutBatch:
        for _ in range(2):
            try:
                await asyncio.sleep(30 if ticket in (1, 3) else 0)
            except asyncio.CancelledError:
                if ticket == 3:
                    raise
        return group_of(ticket)

    run = Run(tmp_path, limits(), generate, timeout=5)
    await run.train()
    assert run.trained == Counter({*range(14)} - {1, 3})


async def test_failing_group_is_replaced(tmp_path: Path):
    async def generate(ticket: int) -> RolloutBatch:
        if ticket % 5 == 1:
            raise KeyError("my bug")
        return await at_once(ticket)

    run = Run(tmp_path, limits(), generate)
    await run.train()
    assert sum(run.trained.values()) == 12 and not any(ticket % 5 == 1 for ticket in run.trained)


async def test_run_error_names_cause_when_all_groups_fail(tmp_path: Path):
    async def generate(ticket: int) -> RolloutBatch:
        raise KeyError("my bug")

    with pytest.raises(AllRolloutsFailedError, match=r"KeyError: 'my bug'.*test_pool"):
        await Run(tmp_path, limits(), generate).train()


async def test_fatal_error_interrupts_training_computation(tmp_path: Path):
    async def generate(ticket: int) -> RolloutBatch:
        if ticket > 2:
            raise ConfigError("no such environment")
        return await at_once(ticket)

    async def compute() -> None:
        await asyncio.sleep(60)

    with pytest.raises(ConfigError, match="no such environment"):
        async with asyncio.timeout(5):
            await Run(tmp_path, limits(), generate).train(compute)


async def test_generator_returning_two_groups_is_named(tmp_path: Path):
    async def generate(ticket: int) -> RolloutBatch:
        return RolloutBatch([*group_of(ticket).groups, *group_of(ticket + 1).groups])

    with pytest.raises(SkyRLError, match="2 groups"):
        await Run(tmp_path, limits(), generate).train()


async def test_filtered_groups_are_replaced(tmp_path: Path):
    run = Run(tmp_path, limits(order="exact"), keep=lambda group: group.uid != "prompt-3", max_filtered=4)
    await run.train()
    assert sum(run.trained.values()) == 12 and not any(ticket % 6 == 3 for ticket in run.trained)


async def test_too_many_filtered_groups_end_run(tmp_path: Path):
    with pytest.raises(SkyRLError, match="5 groups"):
        await Run(tmp_path, limits(), keep=lambda group: False, max_filtered=4).train()


async def test_full_disk_ends_run_and_names_journal(tmp_path: Path):
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    run = Run(tmp_path, limits())
    try:
        with pytest.raises(CheckpointError, match=r"journal\.jsonl .*File too large"):
            await run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    await run.train()
    assert run.trained == Counter(range(12))


async def test_journal_of_other_experiment_is_ignored(tmp_path: Path):
    run = Run(tmp_path, limits())
    await run.train()
    journal = RolloutJournal(tmp_path / "journal.jsonl", EXPERIMENT | {"trainer.seed": 1})
    assert journal.recover(ScheduleState()).groups == {} and not journal.path.exists()


async def test_groups_round_trip_through_journal(tmp_path: Path):
    """Groups are equal to the last bit, with NaN and infinity and with metrics that are NumPy numbers."""
    run = Run(tmp_path, limits(total_steps=1))
    async with run.pool() as pool:
        groups = await pool.next_batch()
    recovered = RolloutJournal(tmp_path / "journal.jsonl", EXPERIMENT).recover(ScheduleState())
    assert [recovered.groups[group.ticket] for group in groups] == groups
    assert recovered.batches == {1: [group.ticket for group in groups]}


async def test_journal_with_changed_digit_is_refused(tmp_path: Path):
    run = Run(tmp_path, limits(total_steps=1))
    async with run.pool() as pool:
        await pool.next_batch()
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    digits = [(number, at) for number, line in enumerate(lines) for at, byte in enumerate(line) if chr(byte).isdigit()]
    for number, at in digits[:: len(digits) // 40]:
        altered = [bytearray(line) for line in lines]
        altered[number][at] = ord("3" if altered[number][at] != ord("3") else "4")
        path.write_bytes(b"".join(altered))
        with pytest.raises(CheckpointError, match=rf"journal\.jsonl, line {number + 1} "):
            RolloutJournal(path, EXPERIMENT).recover(ScheduleState())
    path.write_bytes(whole[:-5])  # the line that a killed process was writing
    assert RolloutJournal(path, EXPERIMENT).recover(ScheduleState()).batches == {}


class TicksThenCancels:
    """Canceller of a task after a number of rounds of the event loop: at each of its awaits, one after the other."""

    def __init__(self, task: "asyncio.Task[Any]", ticks: int):
        self._task, self._ticks = task, ticks
        self._tick()

    def _tick(self) -> None:
        if self._ticks == 0:
            self._task.cancel()
        elif not self._task.done():
            self._ticks -= 1
            asyncio.get_running_loop().call_soon(self._tick)


async def killed_after(run: Run, ticks: int) -> bool:
    """Cancel the run after so many rounds of the event loop. Returns: whether it had ended before."""
    task = asyncio.create_task(run.train())
    TicksThenCancels(task, ticks)
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    left = [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]
    assert not left, f"tasks go on after the end: {left}"
    if not task.cancelled():
        task.result()
    return not task.cancelled()


async def test_cancellation_at_each_await_ends_tasks_and_keeps_groups(tmp_path: Path):
    for ticks in range(1000):
        run = Run(tmp_path / str(ticks), limits())
        was_whole = await killed_after(run, ticks)
        await run.train()
        assert run.trained == Counter(range(12)), f"cancelled after {ticks} rounds"
        if was_whole:
            assert ticks > 25
            return
    raise AssertionError("never ran to its end")


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_each_group_is_trained_once_after_arbitrary_kills(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """The journal is cut at any byte behind the last checkpoint, as by a kill of the process."""
    order = data.draw(st.sampled_from(["finished", "oldest", "exact"]))
    on_stale = data.draw(st.sampled_from(["drop", "regenerate", "mask"]))
    staleness = data.draw(st.integers(0, 3))
    run = Run(
        tmp_path_factory.mktemp("run"),
        limits(order=order, on_stale=on_stale, max_staleness_steps=staleness, max_running=2 * (staleness + 1)),
        checkpoint_lag=data.draw(st.integers(0, 1), label="lag"),
    )
    generated = Counter[int]()

    async def generate(ticket: int) -> RolloutBatch:
        version = run.version
        for _ in range(random.Random(ticket).choice([0, 1, 2, 30])):
            await asyncio.sleep(0)
        generated[ticket] += 1
        return group_of(ticket, version)

    run.generate = generate
    journal = run.folder / "journal.jsonl"
    for _ in range(data.draw(st.integers(0, 5), label="kills")):
        if asyncio.run(killed_after(run, data.draw(st.integers(0, 150), label="rounds"))):
            break
        if journal.exists() and data.draw(st.booleans(), label="torn"):
            content = journal.read_bytes()
            journal.write_bytes(content[: len(content) - data.draw(st.integers(0, 40), label="bytes")])
    asyncio.run(run.train())
    assert run.trained == Counter(range(12))
    if order == "exact":
        assert run.steps == [[2 * i, 2 * i + 1] for i in range(6)]


async def test_finished_group_is_not_regenerated_after_kill(tmp_path: Path):
    generated = Counter[int]()

    async def generate(ticket: int) -> RolloutBatch:
        generated[ticket] += 1
        return await at_once(ticket)

    run = Run(tmp_path, limits(max_staleness_steps=5, max_running=12), generate)
    with pytest.raises(RuntimeError, match="killed"):
        await run.train(killed_when(lambda: sum(generated.values()) == 12))
    assert run.checkpoint["num_trained_steps"] == 0
    await run.train()
    assert generated == Counter(range(12))
    assert run.trained == generated


def killed_when(condition: Callable[[], bool]) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if condition():
            raise RuntimeError("killed")

    return step
