"""Faults planted at each await of an asynchronous run: it ends at once with the fault's name, nothing of it goes on,
and the same command trains every sample that is left, once."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from async_runs import Uneven, asynchronous, steps_of, trained_samples

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import register_environments

Place = tuple[tuple[str, int], ...]
"""Functions of this package and their lines, from a coroutine down to what it waits for."""


class Planted(Exception):
    """A fault of the test."""


def raise_at_await() -> Exception:
    return Planted("planted")


def cancel_at_await() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


Fault = Callable[[], Exception | None]
FAULTS: list[Fault] = [raise_at_await, cancel_at_await]

IN_ORDER = MappingProxyType({"order": "exact", "pause": "wait"})
AS_FINISHED = MappingProxyType({"order": "finished", "pause": "keep"})


class Disturbed(Awaitable[Any]):
    """A coroutine in which a fault happens at the first await for which `is_due` says so.

    Args:
        fault: returns an exception for the coroutine, or cancels the task.
    """

    def __init__(self, coroutine: Any, is_due: Callable[[Place], bool] = lambda place: False, fault: Fault = Exception):
        self._coroutine, self._is_due, self._fault = coroutine, is_due, fault
        self.places: list[Place] = []
        self.has_happened = False

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                waited_for = self._coroutine.throw(error) if error else self._coroutine.send(None)
            except StopIteration as end:
                return end.value
            self.places.append(place_of(self._coroutine))
            error = None
            if not self.has_happened and self._is_due(self.places[-1]):
                self.has_happened = True
                error = self._fault()
                if error is not None:
                    continue
            try:
                yield waited_for
            except BaseException as raised:  # for the coroutine, whatever it is
                error = raised


class Occurrence:
    """True the n-th time that it is asked for this place."""

    def __init__(self, place: Place, number: int):
        self._place, self._left = place, number

    def __call__(self, place: Place) -> bool:
        self._left -= place == self._place
        return not self._left


def place_of(coroutine: Any) -> Place:
    place = []
    while getattr(coroutine, "cr_frame", None) is not None:
        code = coroutine.cr_frame.f_code
        if "skyrl_train" in code.co_filename:
            place.append((code.co_qualname, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return tuple(place)


async def train(cfg: SkyRLConfig, **disturbance: Any) -> tuple[Disturbed, BaseException | None]:
    """Run to the end, or to the fault. Returns: the error with which it ended."""
    trainer = await BasePPOExp(cfg)._setup_trainer()
    disturbed, error = Disturbed(trainer.train(), **disturbance), None

    async def run() -> None:
        await disturbed

    try:
        [done], _ = await asyncio.wait([asyncio.create_task(run())], timeout=90)
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
    finally:
        async with asyncio.timeout(90):
            await trainer.shutdown()
    await asyncio.sleep(0)  # callbacks of what has just ended
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"tasks go on after the end: {left}"
    return disturbed, error


@pytest.fixture
def make_settings(settings: Any, merged: Any, prompts: str, tmp_path: Path) -> Any:
    """Settings of a run that evaluates, exports and saves a checkpoint after each step."""

    def make(name: str, num_steps: int, schedule: Mapping[str, str] = IN_ORDER) -> SkyRLConfig:
        changes = {"max_training_steps": num_steps, "epochs": -(-num_steps // 4)}
        changes |= {"ckpt_interval": 1, "hf_save_interval": 1, "eval_interval": 1, "max_ckpts_to_keep": 1}
        changes = merged(changes, asynchronous(max_staleness_steps=1, **schedule))
        data = {"data": {"val_data": [prompts]}, "environment": {"env_class": "uneven"}}
        return settings(tmp_path / name, {"trainer": changes, **data})

    with register_environments(uneven=Uneven):
        yield make


NUM_STEPS = 4


async def disturb_each_place(make_settings: Any, schedule: Mapping[str, str], faults: list[Fault], every: int) -> None:
    """Train one run, which is disturbed at each place in turn (or every so many) by one of the faults in turn, and
    started again each time, always with three steps left. A place that comes again is disturbed the second time:
    usually in the second step, after a checkpoint."""
    cfg = make_settings("undisturbed", 2, schedule)
    disturbed, error = await train(cfg)
    assert error is None
    counts = Counter(disturbed.places)
    places = list(counts)[::every]
    num_faults = num_steps = 0
    for place, fault in zip(places, itertools.cycle(faults), strict=False):
        cfg = make_settings("disturbed", num_steps + 3, schedule)
        disturbed, error = await train(cfg, is_due=Occurrence(place, min(2, counts[place])), fault=fault)
        num_steps = num_steps_of(cfg)
        num_faults += disturbed.has_happened
        if not disturbed.has_happened:  # an await that was over at once in each of the steps
            assert error is None and num_steps == cfg.trainer.max_training_steps
        elif fault is cancel_at_await:
            assert isinstance(error, asyncio.CancelledError), (place, error)
        else:
            assert "planted" in str(error), (place, error)
    assert num_faults >= 0.8 * len(places), num_steps
    num_epochs = num_steps // 4 + 1
    cfg = make_settings("disturbed", 4 * num_epochs, schedule)
    _, error = await train(cfg)
    assert error is None
    assert [row["step"] for row in steps_of(cfg) if row["step"]] == list(range(1, 4 * num_epochs + 1))
    trained = trained_samples(cfg)
    assert len(trained) == 16 * 4 and set(trained.values()) == {num_epochs}


def num_steps_of(cfg: SkyRLConfig) -> int:
    """Steps in the newest checkpoint."""
    newest = Path(cfg.trainer.ckpt_path) / "latest_ckpt_global_step.txt"
    return int(newest.read_text()) if newest.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "faults"),
    [
        pytest.param(IN_ORDER, FAULTS, id="a sync waits for groups"),
        pytest.param(AS_FINISHED, FAULTS[::-1], id="groups go on over a sync", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(400)])])
async def test_run_fault_at_any_await_loses_no_groups(
    make_settings: Any, schedule: Mapping[str, str], faults: list[Fault], every: int
):
    """The faults alternate from place to place, in the other order with the other schedule."""
    await disturb_each_place(make_settings, schedule, faults, every)


async def test_group_fault_at_any_await_replaces_group(make_settings: Any, monkeypatch: pytest.MonkeyPatch):
    """One group after the other, at each place that any of them waits at."""
    happened: list[Place] = []
    original = FullyAsyncRayPPOTrainer.generate_group

    async def disturbed_group(self: FullyAsyncRayPPOTrainer, ticket: int) -> RolloutBatch:
        fault = FAULTS[ticket % 2]

        def is_due(place: Place) -> bool:
            if (place, fault) in seen:
                return False
            seen.add((place, fault))
            return True

        disturbed = Disturbed(original(self, ticket), is_due, fault)
        try:
            return await disturbed
        finally:
            happened.extend([disturbed.places[-1]] if disturbed.has_happened else [])

    seen: set[tuple[Place, Fault]] = set()
    monkeypatch.setattr(FullyAsyncRayPPOTrainer, "generate_group", disturbed_group)
    cfg = make_settings("run", NUM_STEPS)
    _, error = await train(cfg)
    assert error is None
    failed = sum(row["async/num_failed_groups"] for row in RunFolder(cfg.trainer.run_dir).read_metrics()[1:])
    assert failed == len(happened) >= 2
    assert sum(trained_samples(cfg).values()) == NUM_STEPS * 4 * 4
