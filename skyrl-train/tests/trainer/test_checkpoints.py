"""A checkpoint is whole or not there, whatever happens while it is written."""

import errno
import json
import os
from pathlib import Path

import pytest

from skyrl_gym import whole_folders
from skyrl_train import checkpoints
from skyrl_train.checkpoints import (
    CheckpointStore,
    extract_step_from_path,
    list_checkpoint_dirs,
    verify,
)
from skyrl_train.config import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError, WorkerError
from skyrl_train.training_backends.checkpoint import WrittenFiles
from skyrl_train.utils.io import FileRecord, compute_sha256
from skyrl_train.utils.storage import Place


def write(store: CheckpointStore, step: int, content: str = "weights") -> None:
    with store.writing(step) as draft:
        (draft.folder / "policy").mkdir()
        (draft.folder / "policy" / "rank_0.pt").write_text(content)
        (draft.folder / "state.json").write_text(json.dumps({"step": step}))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def asking(mode: str, path: Path | None = None) -> TrainerConfig:
    return TrainerConfig(resume_mode=mode, resume_path=None if path is None else str(path))  # type: ignore[arg-type]


def resume(store: CheckpointStore, mode: str, path: Path | None = None) -> Place | None:
    """Do with the store what a run does that resumes. Returns: the checkpoint."""
    found = store.find(asking(mode, path))
    folder = None if found is None else found.folder
    store.rename_later(folder)
    return folder


def test_checkpoint_manifest_has_files_and_hashes(tmp_path: Path):
    write(CheckpointStore(tmp_path / "ckpts"), 3)
    assert names(tmp_path / "ckpts") == ["global_step_3", "latest_ckpt_global_step.txt"]
    assert (tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text() == "3\n"
    manifest = json.loads((tmp_path / "ckpts" / "global_step_3" / "manifest.json").read_text())
    assert manifest["global_step"] == 3
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {
        "policy/rank_0.pt": 7,
        "state.json": 11,
    }
    verify(tmp_path / "ckpts" / "global_step_3")


@pytest.mark.parametrize(
    "path, step", [("a/global_step_12", 12), ("global_step_0", 0), ("global_step_", -1), ("global_step_3.partial", -1)]
)
def test_step_is_parsed_from_path(path: str, step: int):
    assert extract_step_from_path(path) == step


def test_checkpoints_are_ordered_by_step_not_by_name(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in (9, 100, 10):
        write(store, step)
    (tmp_path / "global_step_500").mkdir()  # without a manifest: not one
    assert [path.name for path in list_checkpoint_dirs(tmp_path)] == [
        "global_step_9",
        "global_step_10",
        "global_step_100",
    ]


@pytest.mark.parametrize("stage", ["mkdir", "content", "compute_sha256", "manifest", "rename", "fsync_folder"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failure_at_any_stage_leaves_earlier_checkpoints_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
):
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def fail(*_: object, **__: object) -> None:
        raise error

    content = "weights"
    with monkeypatch.context() as patch:
        if stage in ("mkdir", "rename"):
            patch.setattr(Path, stage, fail)
        elif stage == "manifest":
            patch.setattr(checkpoints.CheckpointDraft, "write_manifest", fail)
        elif stage == "content":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(checkpoints if stage == "compute_sha256" else whole_folders, stage, fail)
        expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as raised:
            write(store, 2, content)
    if isinstance(error, OSError):
        assert "checkpoint of step 2 could not be written" in str(raised.value)
        assert "the newest complete checkpoint is global_step_1" in str(raised.value)
    assert names(tmp_path) == ["global_step_1", "latest_ckpt_global_step.txt"]
    verify(tmp_path / "global_step_1")
    write(store, 2)  # the next try succeeds
    verify(tmp_path / "global_step_2")


def test_complete_checkpoint_survives_failed_write_of_latest_file(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "latest_ckpt_global_step.txt").mkdir()  # nothing can be written there
    with pytest.raises(CheckpointError, match="global_step_1"):
        write(store, 1)
    verify(tmp_path / "global_step_1")


def test_crashed_worker_is_not_reported_as_full_disk(tmp_path: Path):
    with pytest.raises(WorkerError, match="policy worker 0"), CheckpointStore(tmp_path).writing(1):
        raise WorkerError("policy worker 0 died")
    assert names(tmp_path) == []


def written(folder: Path, node: str, **sizes: int) -> WrittenFiles:
    """Files of so many bytes, written into `folder` by a rank, and its report."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
    return WrittenFiles(node, {name: FileRecord(size, compute_sha256(folder / name)) for name, size in sizes.items()})


def test_checkpoint_is_sealed_when_driver_sees_files_of_every_rank(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    with store.writing(1) as draft:
        folder = draft.folder / "policy"
        draft.add("policy", [written(folder, "a", rank_0=3), written(folder, "b", rank_1=4, rank_0=3)])
    verify(tmp_path / "global_step_1")


@pytest.mark.parametrize("seen", [None, 2])
def test_checkpoint_is_not_sealed_when_driver_misses_file(tmp_path: Path, seen: int | None):
    """The second node has a folder of its own under the same name: what it wrote is not there, or is another file."""
    store = CheckpointStore(tmp_path / "driver")
    write(store, 1)
    with pytest.raises(CheckpointError) as error, store.writing(2) as draft:
        folder = draft.folder / "policy"
        reports = [written(folder, "node-a", rank_0=3)]
        reports.append(written(tmp_path / "other node" / "policy", "node-b", rank_1=4))
        if seen:
            written(folder, "node-b", rank_1=seen)
        draft.add("policy", reports)
    for words in ("policy rank 1 on node node-b wrote rank_1 (4 bytes)", "trainer.ckpt_path", "global_step_1"):
        assert words in str(error.value)
    assert names(tmp_path / "driver") == ["global_step_1", "latest_ckpt_global_step.txt"]


def test_partial_checkpoints_of_killed_writer_are_removed(tmp_path: Path):
    left = tmp_path / "global_step_1.partial"
    left.mkdir()
    (left / "half").write_text("x")
    assert resume(CheckpointStore(tmp_path), "latest") is None
    write(CheckpointStore(tmp_path), 1)
    assert names(tmp_path) == ["global_step_1", "latest_ckpt_global_step.txt"]
    assert not (tmp_path / "global_step_1" / "half").exists()


@pytest.mark.parametrize("max_to_keep, kept", [(-1, [1, 2, 3]), (1, [3]), (2, [2, 3]), (5, [1, 2, 3])])
def test_only_newest_checkpoints_are_kept(tmp_path: Path, max_to_keep: int, kept: list[int]):
    store = CheckpointStore(tmp_path, max_to_keep)
    for step in (1, 2, 3):
        write(store, step)
    assert [extract_step_from_path(path) for path in list_checkpoint_dirs(tmp_path)] == kept


def test_fresh_start_renames_old_checkpoints(tmp_path: Path):
    """Else the old step 9 would count as newer than the new step 1: kept in its place, and gone on from."""
    write(CheckpointStore(tmp_path), 9, "of the first course")
    store = CheckpointStore(tmp_path, max_to_keep=1)
    assert resume(store, "none") is None
    write(store, 1)
    assert resume(store, "latest") == tmp_path / "global_step_1"
    assert (tmp_path / "superseded_global_step_9" / "policy" / "rank_0.pt").read_text() == "of the first course"


def test_resume_from_earlier_step_renames_later_checkpoints(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(store, step)
    assert resume(store, "from_path", tmp_path / "global_step_2") == tmp_path / "global_step_2"
    assert resume(store, "latest") == tmp_path / "global_step_2"
    assert (tmp_path / "superseded_global_step_3").is_dir()


def test_resume_from_other_run_renames_own_checkpoints(tmp_path: Path):
    write(CheckpointStore(tmp_path / "other"), 5)
    store = CheckpointStore(tmp_path / "own")
    write(store, 1)
    write(store, 7)
    assert resume(store, "from_path", tmp_path / "other" / "global_step_5") == tmp_path / "other" / "global_step_5"
    assert list_checkpoint_dirs(tmp_path / "own") == []
    assert names(tmp_path / "other") == ["global_step_5", "latest_ckpt_global_step.txt"]


@pytest.mark.parametrize(
    "name, rule", [("ckpts", "ending in global_step_N"), ("global_step_8", "no complete checkpoint found at")]
)
def test_resume_path_without_checkpoint_is_refused(tmp_path: Path, name: str, rule: str):
    with pytest.raises(ConfigError, match=f"trainer.resume_path.*{rule}"):
        resume(CheckpointStore(tmp_path), "from_path", tmp_path / name)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, expected",
    [
        (flip_a_bit, "rank_0.pt is corrupted"),
        (lambda path: os.truncate(path, 3), "rank_0.pt is corrupted"),
        (Path.unlink, "rank_0.pt is missing"),
        (lambda path: (path.parents[1] / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
    ],
    ids=["flipped bit", "cut off", "missing", "empty manifest"],
)
def test_altered_checkpoint_error_gives_remedy(tmp_path: Path, damage, expected: str):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    write(store, 2)
    damage(tmp_path / "global_step_2" / "policy" / "rank_0.pt")
    way_out = f"trainer.resume_mode=from_path trainer.resume_path={tmp_path / 'global_step_1'}"
    with pytest.raises(CheckpointError, match=f"{expected}.*{way_out}"):
        resume(store, "latest")
    damage_of_the_only_one = tmp_path / "global_step_1" / "policy" / "rank_0.pt"
    flip_a_bit(damage_of_the_only_one)
    (tmp_path / "global_step_2").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"trainer\.resume_mode=none\."):
        resume(store, "latest")
