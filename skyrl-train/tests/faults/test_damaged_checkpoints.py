"""A checkpoint is whole or not there, and one that was altered is not gone on from: in a real run."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.checkpoints import list_checkpoint_dirs, verify
from skyrl_train.errors import CheckpointError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def disk_of_2_mb(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system to fill it")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """A file that takes all space but a little."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    path = disk / "somebody_elses_file"
    path.write_bytes(b"x" * (free - leave_bytes))
    return path


async def test_full_disk_loses_new_checkpoint_only(start_run, prompt, tmp_path: Path, disk_of_2_mb: Path):
    changes = {"ckpt_path": str(disk_of_2_mb / "ckpts"), "ckpt_interval": 1}
    async with start_run(tmp_path, [[prompt("works")]], trainer=changes) as trainer:
        await trainer.train()
        root = disk_of_2_mb / "ckpts"
        first = root / "global_step_1"
        verify(first)
        taken = fill(disk_of_2_mb, leave_bytes=100_000)
        trainer.global_step = 2
        with pytest.raises(CheckpointError) as error:
            await trainer.save_checkpoint()
        for words in (
            "checkpoint of step 2",
            str(root),
            "No space left",
            "newest complete checkpoint is global_step_1",
        ):
            assert words in str(error.value)
        verify(first)
        assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "latest_ckpt_global_step.txt"]
        taken.unlink()
        await trainer.save_checkpoint()  # the workers are as they were
        verify(root / "global_step_2")


async def test_altered_checkpoint_is_refused_and_older_one_used(start_run, prompt, tmp_path: Path):
    async with start_run(tmp_path, [[prompt("works")], [prompt("works")]], trainer={"ckpt_interval": 1}) as trainer:
        await trainer.train()
        root = tmp_path / "ckpts"
        older, newer = list_checkpoint_dirs(root)
        damaged = max((newer / "policy").iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            await trainer.load_checkpoint()
        assert f"{damaged} is corrupted" in str(error.value)
        assert f"trainer.resume_mode=from_path trainer.resume_path={older}" in str(error.value)

        trainer.cfg.trainer.resume_mode = "from_path"
        trainer.cfg.trainer.resume_path = str(older)
        await trainer.load_checkpoint()
        assert trainer.global_step == 1
        assert [path.name for path in list_checkpoint_dirs(root)] == ["global_step_1"]
        assert (root / "superseded_global_step_2").is_dir()
        metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in metrics] == [1], "what came after that step did not happen"
