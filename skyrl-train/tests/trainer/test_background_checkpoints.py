"""Checkpoints that are written beside the training hold the state of their step, and complete in time or not at all."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_equal_runs, asynchronous, steps_of

from skyrl_train.checkpoint_saver import CheckpointSaver
from skyrl_train.checkpoints import list_checkpoint_dirs, verify
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import CheckpointError
from skyrl_train.rollouts.journal import RolloutJournal
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_backends import checkpoint

THREE_STEPS = {"max_training_steps": 3, "ckpt_interval": 1, "hf_save_interval": 3}
IN_BACKGROUND = THREE_STEPS | {"ckpt_async": True}


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every file take a third of a second, longer than a step. Returns: threads that write."""
    threads: list[str] = []
    original = checkpoint.write_durably

    def write(*args: Any) -> None:
        threads.append(threading.current_thread().name)
        time.sleep(0.3)
        original(*args)

    monkeypatch.setattr(checkpoint, "write_durably", write)
    return threads


def steps_of_checkpoints(cfg: SkyRLConfig) -> list[str]:
    return [folder.name for folder in list_checkpoint_dirs(cfg.trainer.ckpt_path)]


def hashes_of(cfg: SkyRLConfig) -> dict[str, Any]:
    """Size and hash of every file of a model."""
    return {
        f"{folder.name}/{name}": record
        for folder in list_checkpoint_dirs(cfg.trainer.ckpt_path)
        for name, record in verify(folder).items()
        if name.startswith("policy/")
    }


@pytest.mark.slow
def test_background_checkpoint_keeps_step_bits_while_training_continues(
    settings: Any, run: Any, tmp_path: Path, slow_writes: list[str]
):
    background = settings(tmp_path / "background", {"trainer": IN_BACKGROUND | {"ckpt_interval": 2}})
    run(background)
    assert set(slow_writes) == {"checkpoint"}, "no model is written in the thread that trains"
    at_once = settings(tmp_path / "at once", {"trainer": THREE_STEPS | {"ckpt_interval": 2}})
    run(at_once)
    assert hashes_of(background) == hashes_of(at_once)
    assert_equal_runs(background, at_once)
    resumed = settings(
        tmp_path / "resumed",
        {
            "trainer": IN_BACKGROUND
            | {"resume_mode": "from_path", "resume_path": f"{tmp_path}/background/ckpts/global_step_2"}
        },
    )
    run(resumed)
    assert steps_of(resumed) == steps_of(at_once)[2:]


def test_failed_background_write_ends_run_and_keeps_previous_checkpoint(
    settings: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = checkpoint.write_durably

    def write(file: Path, content: bytes) -> None:
        if "global_step_2" in str(file):
            raise OSError("No space left on device")
        original(file, content)

    monkeypatch.setattr(checkpoint, "write_durably", write)
    cfg = settings(tmp_path, {"trainer": IN_BACKGROUND})
    with pytest.raises(CheckpointError, match="global_step_1"):
        run(cfg)
    assert steps_of_checkpoints(cfg) == ["global_step_1"]
    assert not list(tmp_path.glob("ckpts/*.partial"))


class ImpatientTrainer(RayPPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.saver = CheckpointSaver(self.checkpoints, in_background=True, timeout_seconds=0.5)


class ImpatientExperiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> RayPPOTrainer:
        return ImpatientTrainer(**parts)


def test_background_write_timeout_raises(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    monkeypatch.setattr(checkpoint, "write_durably", lambda *_: released.wait(60))
    cfg = settings(tmp_path, {"trainer": IN_BACKGROUND})
    with pytest.raises(CheckpointError, match=r"step 1.*0\.5 s"):
        ImpatientExperiment(cfg).run()
    released.set()
    assert steps_of_checkpoints(cfg) == []


@pytest.mark.slow
def test_journal_is_compacted_after_checkpoint_completes(
    settings: Any, run: Any, tmp_path: Path, slow_writes: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Every time the journal is shortened, the checkpoint of the marked state is complete; later decisions stay in the
    journal.
    """
    cfg = settings(tmp_path, {"trainer": asynchronous() | IN_BACKGROUND | {"ckpt_interval": 2}})
    original, kept = RolloutJournal.compact, list[tuple[list[str], list[int]]]()

    def shorten(journal: RolloutJournal) -> None:
        complete = steps_of_checkpoints(cfg)
        original(journal)
        lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
        kept.append((complete, [line["batch"] for line in lines if "batch" in line]))

    monkeypatch.setattr(RolloutJournal, "compact", shorten)
    run(cfg)
    assert [complete for complete, _ in kept] == [["global_step_2"], ["global_step_2", "global_step_3"]]
    assert kept[0][1] == [3], "step 3 had begun when the checkpoint of step 2 was complete"
    assert kept[1][1] == []


class FailingTrainer(RayPPOTrainer):
    """Trainer whose third step fails while the checkpoint of the second is written."""

    def compute_advantages_and_returns(self, batch: Any) -> Any:
        if self.global_step == 3:
            raise ZeroDivisionError("my estimator")
        return super().compute_advantages_and_returns(batch)


class FailingExperiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> RayPPOTrainer:
        return FailingTrainer(**parts)


def test_failing_run_completes_pending_checkpoint(settings: Any, tmp_path: Path, slow_writes: list[str]):
    cfg = settings(tmp_path, {"trainer": IN_BACKGROUND | {"ckpt_interval": 2}})
    with pytest.raises(ZeroDivisionError):
        FailingExperiment(cfg).run()
    assert steps_of_checkpoints(cfg) == ["global_step_2"]
    verify(tmp_path / "ckpts" / "global_step_2")


async def test_saver_does_not_wait_when_idle():
    saver = CheckpointSaver(None, in_background=True, timeout_seconds=1)  # type: ignore[arg-type]
    await asyncio.wait_for(saver.wait(), 1)
    await asyncio.wait_for(saver.raise_failure(), 1)
