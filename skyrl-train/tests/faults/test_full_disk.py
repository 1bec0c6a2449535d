"""A disk that is full at any write of a run ends it with an error that names a file, and the run resumes exactly."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import (
    DifferentCharacters,
    make_tiny_run,
    merge_settings,
    register_environments,
    write_prompts,
)

WHOLE = 1300
"""Kilobytes that are more than the run of this file writes."""

EVERYTHING: dict[str, Any] = {
    "trainer": {
        "max_training_steps": 2,
        "ckpt_interval": 1,
        "hf_save_interval": 1,
        "eval_interval": 1,
        "eval_before_train": False,
        "dump_data_batch": True,
    }
}
ASYNCHRONOUS: dict[str, Any] = {
    "trainer": {
        "placement": {"colocate_all": False},
        "fully_async": {"enabled": True, "max_staleness_steps": 0, "order": "exact"},
    }
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disk(kilobytes)`: a file system of that size, the same one with another size the second time."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def make(kilobytes: int) -> Path:
        options = f"{'remount,' if folder.is_mount() else ''}size={kilobytes}k"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("only root can mount a small file system to fill it")
        return folder

    yield make
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def contents(cfg: SkyRLConfig) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metrics that do not depend on the clock, and the bytes of weights and trajectories."""
    folder = RunFolder(cfg.trainer.run_dir)
    timed = ("timing/", "async/", "memory/", "engines/")
    rows = [
        {name: value for name, value in row.items() if not name.startswith(timed) and "seconds" not in name}
        for row in folder.read_metrics()
    ]
    for row in rows:
        row.pop("time")
    files = [*folder.path.rglob("exports/*/policy/model.safetensors"), *folder.trajectories_folder.glob("*")]
    return rows, {str(file.relative_to(folder.path)): file.read_bytes() for file in files}


# Each size ends the run at another write: the owner's record, the settings, the dumped batch, tokens and trajectories,
# metrics, export, checkpoint, and these of the second step.
@pytest.mark.full
@pytest.mark.first_case
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_full_disk_ends_run_with_named_file_and_exact_resume(
    disk: Callable[[int], Path], tmp_path: Path, chat_model: str, capfd: pytest.CaptureFixture[str], kind: str
):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    changes = merge_settings(EVERYTHING, {"data": {"val_data": [prompts]}})
    if kind == "asynchronous":
        changes = merge_settings(changes, ASYNCHRONOUS)

    def settings(run_dir: Path) -> SkyRLConfig:
        return SkyRLConfig.from_dict(make_tiny_run(run_dir, chat_model, prompts, changes))

    with register_environments(different_characters=DifferentCharacters):
        whole = settings(tmp_path / "whole")
        run_experiment(whole)
        for kilobytes in (4, 16, 32, 320, 344, 360, 400, 480, 640, 760, 840, 1000):
            folder = disk(kilobytes)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                run_experiment(settings(folder / "run"))
            text = capfd.readouterr().err
            *_, error = [line for line in text.splitlines() if " ERROR " in line]
            assert ended.value.code == 1 and f"{folder}/run" in error and "No space left" in text, text
            disk(WHOLE * 10)
            run_experiment(settings(folder / "run"))
            assert contents(settings(folder / "run")) == contents(whole), kilobytes
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
