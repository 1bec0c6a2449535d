"""A run that gets SIGTERM saves a checkpoint, from which it goes on exactly."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments

Settings = Callable[..., Any]
THREE_STEPS = {"trainer": {"max_training_steps": 3, "ckpt_interval": 10}}
ASYNC = {
    "trainer": {
        "placement": {"colocate_all": False},
        "algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}},
        "fully_async": {"enabled": True, "max_staleness_steps": 0, "order": "exact"},
    }
}


class Stopper:
    """Sender of SIGTERM to this process, at one of its calls.

    Args:
        blocks: the call that sends does not return before `released` is set.
    """

    def __init__(self, at_call: int, *, num_signals: int = 1, blocks: bool = False):
        self.left, self.num_signals, self.blocks = at_call, num_signals, blocks
        self.released = threading.Event()

    def call(self) -> None:
        self.left -= 1
        if self.left == 0:
            for _ in range(self.num_signals):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)  # signals that are pending together count once
            if self.blocks:
                self.released.wait(60)


@contextmanager
def called_in_environment(stopper: Stopper) -> Iterator[dict[str, Any]]:
    class Environment(DifferentCharacters):
        def step(self, action: str) -> BaseTextEnvStepOutput:
            stopper.call()
            return super().step(action)

    with register_environments(stopped=Environment):
        yield {"environment": {"env_class": "stopped"}}


@contextmanager
def called_in_loss(stopper: Stopper) -> Iterator[dict[str, Any]]:
    def loss(log_probs: Any, old_log_probs: Any, advantages: Any, *_: Any) -> Any:
        stopper.call()
        return -log_probs * advantages, {}

    PolicyLossRegistry.register("stopped", loss)
    try:
        yield {"trainer": {"algorithm": {"policy_loss_type": "stopped"}}}
    finally:
        PolicyLossRegistry.unregister("stopped")


@pytest.fixture(autouse=True)
def interrupted_by_default() -> Iterator[None]:
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, handler)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of each step, without times and caches, and hashes of batches and weights."""
    left_out = ("timing/", "memory/", "engines/", "async/")
    rows = RunFolder(run_dir).read_metrics()
    return [
        {
            name: value
            for name, value in row.items()
            if name != "time" and "seconds" not in name and not name.startswith(left_out)
        }
        for row in rows
    ]


def checkpoints_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "ckpts").glob("global_step_*"))


@contextmanager
def called_in(environment: Stopper | None = None, loss: Stopper | None = None) -> Iterator[dict[str, Any]]:
    never = Stopper(-1)
    with called_in_environment(environment or never) as own, called_in_loss(loss or never) as others:
        yield own | others


@pytest.fixture(scope="module")
def whole(settings: Settings, merged: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    """`whole(is_asynchronous)`: the steps of a run that nothing stops; trained once."""

    @functools.cache
    def train(is_asynchronous: bool) -> Any:
        folder = tmp_path_factory.mktemp("whole")
        with called_in() as own:
            changes = merged(THREE_STEPS, ASYNC) if is_asynchronous else THREE_STEPS
            BasePPOExp(settings(folder, merged(changes, own))).run()
        return steps_of(folder)

    return train


@pytest.mark.first_case
# 16 answers a step; two optimizer steps of two micro-batches each.
@pytest.mark.parametrize(
    "where, at_call, changes, expected",
    [
        ("environment", 16 + 3, {}, "global_step_1"),
        ("environment", 16 + 3, {"trainer": {"ckpt_async": True}}, "global_step_1"),
        ("loss", 4 + 1, {}, "global_step_2"),
        ("environment", 16 + 3, ASYNC, "global_step_1"),
        ("loss", 4 + 1, ASYNC, "global_step_2"),
    ],
    ids=["generation", "generation, ckpt_async", "update", "asynchronous generation", "asynchronous update"],
)
def test_stopped_run_resumes_exactly(
    settings: Settings, merged: Any, whole: Any, tmp_path: Path, where: str, at_call: int, changes: Any, expected: str
) -> None:
    stopper = Stopper(at_call, blocks=where == "environment")
    with called_in(**{where: stopper}) as own:
        cfg = settings(tmp_path, merged(merged(THREE_STEPS, changes), own))
        with pytest.raises(KeyboardInterrupt):
            BasePPOExp(cfg).run()
        stopper.released.set()
        assert checkpoints_of(tmp_path) == [expected]
        BasePPOExp(cfg).run()
    resumed = steps_of(tmp_path)
    assert [row["step"] for row in resumed] == [1, 2, 3]
    assert resumed == whole(changes is ASYNC)


def test_stop_within_first_step_leaves_no_checkpoint(settings: Settings, merged: Any, tmp_path: Path) -> None:
    with called_in_environment(Stopper(1)) as own, pytest.raises(KeyboardInterrupt):
        BasePPOExp(settings(tmp_path, merged(THREE_STEPS, own))).run()
    assert checkpoints_of(tmp_path) == []


@pytest.mark.first_case
@pytest.mark.parametrize(
    "num_signals, changes",
    [(2, {}), (1, {"trainer": {"stop_timeout_seconds": 0}}), (1, {"trainer": {"ckpt_interval": -1}})],
    ids=["second signal", "no time", "no checkpoints"],
)
def test_immediate_stop_leaves_no_checkpoint(
    settings: Settings, merged: Any, tmp_path: Path, num_signals: int, changes: Any
) -> None:
    with called_in_loss(Stopper(4 + 1, num_signals=num_signals)) as own, pytest.raises(KeyboardInterrupt):
        BasePPOExp(settings(tmp_path, merged(merged(THREE_STEPS, changes), own))).run()
    assert checkpoints_of(tmp_path) == []
    assert [row["step"] for row in steps_of(tmp_path)] == [1]


def test_stop_ends_run_when_step_exceeds_deadline(
    settings: Settings, merged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.orchestration.inline_launcher.EXIT_SECONDS", 0.1)  # the worker's call never ends
    stopper = Stopper(1, blocks=True)
    changes = {"trainer": {"stop_timeout_seconds": 0.2}}
    with called_in_loss(stopper) as own, pytest.raises(KeyboardInterrupt):
        BasePPOExp(settings(tmp_path, merged(merged(THREE_STEPS, changes), own))).run()
    stopper.released.set()
    assert checkpoints_of(tmp_path) == []
