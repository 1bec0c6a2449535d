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
from skyrl_train_testing.tiny_runs import merge_settings

pytestmark = pytest.mark.process

EIGHT_STEPS = {"max_training_steps": 8, "epochs": 2, "ckpt_interval": 3, "hf_save_interval": 8}
ENDED = 0


class KilledRun:
    """A run that is started until it has ended."""

    def __init__(self, cfg: SkyRLConfig, folder: Path):
        from skyrl_train.config import get_config_as_dict

        self.cfg, self._log = cfg, str(folder / "console.log")
        self._settings = json.loads(json.dumps(get_config_as_dict(cfg)))
        self.num_starts = self.num_kills = 0
        folder.mkdir(parents=True, exist_ok=True)

    def change(self, changes: dict[str, Any]) -> None:
        """Change settings of the following starts."""
        self._settings = merge_settings(self._settings, changes)

    def start(self) -> BaseProcess:
        self.num_starts += 1
        process = fork_server().Process(target=train, args=(self._settings, self._log))
        process.start()
        return process

    def run_to_completion(self) -> None:
        process = self.start()
        process.join(300)
        assert process.exitcode == ENDED, self.log()

    def run_with_kills(self, num_kills: int, role: str = "driver") -> None:
        """Kill a process of the run at random moments, each a few lines of the journal after the one before, and start
        the run again whenever it ends by that.

        Args:
            role: part of the name of the process that is killed; `driver` is the one that was started.
        """
        numbers = random.Random(num_kills)
        trainer = self.cfg.trainer
        # So that the run has groups enough for all kills: several lines that are seen at once count as one.
        most = max(1, min(5, trainer.max_training_steps * trainer.train_batch_size // (num_kills + 1)))
        process = self.start()
        while self.num_kills < num_kills and process.exitcode != ENDED:
            if self._continues_for(process, numbers.randint(1, most)):
                time.sleep(numbers.uniform(0, 0.05))
                victims = [process.pid] if role == "driver" else processes_of(process.pid, role)
                for victim in victims[:1]:
                    assert victim is not None
                    os.kill(victim, signal.SIGKILL)
                    self.num_kills += 1
                if role == "driver":
                    process.join()
            if process.exitcode not in (None, ENDED):
                process = self.start()
        process.join(300)
        if process.exitcode != ENDED:
            self.run_to_completion()
        assert self.num_kills >= num_kills / 2, f"ended after {self.num_kills} kills: no proof"

    def _continues_for(self, process: BaseProcess, num_lines: int) -> bool:
        """Wait until the journal has got so many lines more. Returns: False if the run ended before."""
        journal, deadline = RunFolder(self.cfg.trainer.run_dir).journal_path, time.monotonic() + 120
        size = before = journal.stat().st_size if journal.exists() else 0
        while num_lines > 0:
            if process.exitcode is not None:
                return False
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.002)
            size = journal.stat().st_size if journal.exists() else 0
            num_lines -= size != before
            before = size
        return True

    def log(self) -> str:
        return Path(self._log).read_text()[-4000:]


def processes_of(driver: int | None, role: str) -> list[int]:
    """Processes that the driver's Ray started and whose name has `role` in it."""
    children = psutil.Process(driver).children(recursive=True)
    return [child.pid for child in children if role in " ".join(child.cmdline())]


@pytest.fixture
def killed_run(settings: Any, tmp_path: Path) -> Any:
    def make(name: str, **fully_async: Any) -> KilledRun:
        launcher = fully_async.pop("launcher", "inline")
        is_background = fully_async.pop("ckpt_async", False)
        changes = merge_settings(EIGHT_STEPS | {"ckpt_async": is_background}, asynchronous(**fully_async))
        changes = merge_settings(changes, {"placement": {"launcher": launcher}})
        if launcher == "ray":  # an engine is replaced while the run goes on, which must be long enough for all kills
            changes |= {"max_training_steps": 16, "epochs": 4}
        cfg = settings(tmp_path / name, {"trainer": changes, "environment": {"env_class": "uneven"}})
        return KilledRun(cfg, tmp_path / name)

    return make


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(dict(max_staleness_steps=0, order="exact"), marks=pytest.mark.full),
        dict(max_staleness_steps=1, order="exact", pause="wait", ckpt_async=True),
        pytest.param(
            dict(max_staleness_steps=2, order="exact", pause="wait", sync_every_steps=2), marks=pytest.mark.full
        ),
    ],
    ids=["staleness 0", "one step off", "a sync every second step"],
)
def test_exact_order_run_resumes_bitwise_after_kill(killed_run: Any, schedule: dict[str, Any], num_kills: int):
    whole, killed = killed_run("whole", **schedule), killed_run("killed", **schedule)
    whole.run_to_completion()
    killed.run_with_kills(num_kills)
    assert_equal_runs(killed.cfg, whole.cfg)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "on_stale", ["regenerate", *(pytest.param(name, marks=pytest.mark.full) for name in ("drop", "mask"))]
)
def test_killed_run_trains_each_sample_once_per_epoch(killed_run: Any, on_stale: str, num_kills: int):
    run = killed_run("killed", order="finished", on_stale=on_stale)
    run.run_with_kills(num_kills)
    trained = trained_samples(run.cfg)
    assert len(trained) == 16 * 4 and set(trained.values()) == {2}
    assert [row["step"] for row in RunFolder(run.cfg.trainer.run_dir).read_metrics()] == list(range(1, 9))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_killed_run_regenerates_groups_when_temperature_changes(killed_run: Any) -> None:
    run = killed_run("killed", order="finished")
    folder, process = RunFolder(run.cfg.trainer.run_dir), run.start()
    deadline = time.monotonic() + 120
    while len(folder.read_metrics()) < 4:
        assert process.exitcode is None and time.monotonic() < deadline, run.log()
        time.sleep(0.01)
    process.kill()
    process.join()
    resumed = max(int(path.name.rpartition("_")[2]) for path in folder.path.glob("ckpts/global_step_*"))
    run.change({"generator": {"sampling_params": {"temperature": 0.3}}, "trainer": {"resume_allow_changes": True}})
    run.run_to_completion()
    rows = folder.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    # Nothing that was sampled at temperature 1 is trained: the first step's groups are all of the resumed run.
    assert rows[resumed]["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
    assert rows[resumed]["async/staleness_mean"] == 0


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("role", ["driver", "WorkerProcess", "EngineProcess"])
def test_thirty_kills_under_ray_train_each_sample_once_per_epoch(killed_run: Any, role: str):
    """Ten of the driver, ten of a worker, ten of an engine."""
    run = killed_run("killed", order="finished", launcher="ray")
    run.run_with_kills(10, role)
    assert run.num_kills == 10
    trained = trained_samples(run.cfg)
    assert len(trained) == 16 * 4 and set(trained.values()) == {4}
