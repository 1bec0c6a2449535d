"""Asynchronous runs that are killed (kill -9) at random moments and started again: every sample is trained exactly
once, and where nothing depends on the clock the run is the same to the bit."""

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import assert_equal_runs, asynchronous, fork_server, train, trained_samples

from skyrl_train.config import SkyRLConfig
from skyrl_train.utils.run_folder import RunFolder

pytestmark = pytest.mark.process

EIGHT_STEPS = {"max_training_steps": 8, "epochs": 2, "ckpt_interval": 3, "hf_save_interval": 8}
ENDED = 0
RUN_FAILED = 1


class KilledRun:
    """A run that is started until it has ended."""

    def __init__(self, cfg: SkyRLConfig, folder: Path):
        from skyrl_train.config import get_config_as_dict

        self.cfg, self._log = cfg, str(folder / "console.log")
        self._settings = json.loads(json.dumps(get_config_as_dict(cfg)))
        self.num_starts = 0
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> BaseProcess:
        self.num_starts += 1
        process = fork_server().Process(target=train, args=(self._settings, self._log))
        process.start()
        return process

    def run_whole(self) -> float:
        """Returns: seconds of the whole run."""
        began = time.monotonic()
        process = self.start()
        process.join(300)
        assert process.exitcode == ENDED, self.log()
        return time.monotonic() - began

    def run_with_kills(self, moments: list[float], role: str = "driver") -> None:
        """Start the run again and again; kill a process of it that many seconds after each start.

        Args:
            role: part of the name of the process that is killed; `driver` is the one that was started.
        """
        for moment in moments:
            process = self.start()
            process.join(moment)
            if process.exitcode == ENDED:
                return
            victims = [process.pid] if role == "driver" else processes_of(process.pid, role)
            for victim in victims[:1]:
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
            process.join(300)  # after another process's death: the run goes on, or ends with a named error
            assert process.exitcode is not None, self.log()
            if process.exitcode == ENDED:
                return
        self.run_whole()

    def log(self) -> str:
        return Path(self._log).read_text()[-4000:]


def processes_of(driver: int | None, role: str) -> list[int]:
    """Processes that the driver's Ray started and whose name has `role` in it."""
    children = psutil.Process(driver).children(recursive=True)
    return [child.pid for child in children if role in " ".join(child.cmdline())]


@pytest.fixture
def killed_run(settings: Any, merged: Any, tmp_path: Path) -> Any:
    def make(name: str, **fully_async: Any) -> KilledRun:
        changes = merged(EIGHT_STEPS, asynchronous(**fully_async))
        launcher = fully_async.pop("launcher", "inline")
        changes = merged(changes, {"placement": {"launcher": launcher}})
        changes["fully_async"].pop("launcher", None)
        cfg = settings(tmp_path / name, {"trainer": changes, "environment": {"env_class": "uneven"}})
        return KilledRun(cfg, tmp_path / name)

    return make


def moments_of(seconds: float, num_kills: int, seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [numbers.uniform(0.2, 0.9) * seconds for _ in range(num_kills)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "schedule",
    [dict(max_staleness_steps=0, order="exact"), dict(max_staleness_steps=1, order="exact", pause="wait")],
    ids=["staleness 0", "one step off"],
)
def test_a_run_that_does_not_depend_on_the_clock_goes_on_bit_for_bit(
    killed_run: Any, schedule: dict[str, Any], num_kills: int
):
    whole, killed = killed_run("whole", **schedule), killed_run("killed", **schedule)
    seconds = whole.run_whole()
    killed.run_with_kills(moments_of(seconds, num_kills, seed=num_kills))
    assert killed.num_starts > 1
    assert_equal_runs(killed.cfg, whole.cfg)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize("on_stale", ["mask", pytest.param("drop", marks=pytest.mark.full)])
def test_a_run_that_depends_on_the_clock_trains_every_sample_once_an_epoch(
    killed_run: Any, on_stale: str, num_kills: int
):
    run = killed_run("killed", order="finished", on_stale=on_stale)
    seconds = killed_run("whole", order="finished", on_stale=on_stale).run_whole()
    run.run_with_kills(moments_of(seconds, num_kills, seed=num_kills))
    assert run.num_starts > 1
    trained = trained_samples(run.cfg)
    assert len(trained) == 16 * 4 and set(trained.values()) == {2}
    assert [row["step"] for row in RunFolder(run.cfg.trainer.run_dir).read_metrics()] == list(range(1, 9))


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("role", ["driver", "WorkerProcess", "EngineProcess"])
def test_thirty_kills_under_ray_train_every_sample_once_an_epoch(killed_run: Any, role: str):
    """Ten of the driver, ten of a worker, ten of an engine."""
    run = killed_run("killed", order="finished", launcher="ray")
    seconds = killed_run("whole", order="finished", launcher="ray").run_whole()
    run.run_with_kills(moments_of(seconds, 10, seed=1), role)
    trained = trained_samples(run.cfg)
    assert len(trained) == 16 * 4 and set(trained.values()) == {2}
