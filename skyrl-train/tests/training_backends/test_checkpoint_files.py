"""Files of a checkpoint: every tensor once, shared out over ranks; what does not fit is named."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.errors import CheckpointError
from skyrl_train.training_backends import checkpoint
from skyrl_train.training_backends.checkpoint import StateFiles, write_state
from skyrl_train.utils import storage
from skyrl_train.utils.io import FileRecord, compute_sha256

TENSORS = {f"layer.{i}.weight": torch.full((64, 16 + i), float(i)) for i in range(9)} | {"step": torch.tensor(3.0)}


def write(folder: Path, num_ranks: int = 1) -> list[checkpoint.WrittenFiles]:
    return [write_state(folder, iter(TENSORS.items()), 7, rank, num_ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_split_tensors_and_hash_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int):
    monkeypatch.setattr(checkpoint, "_MAX_FILE_BYTES", 10_000)
    reports = write(tmp_path, num_ranks)
    records = {name: record for report in reports for name, record in report.files.items()}
    assert sum(len(report.files) for report in reports) == len(records), "no file has two writers"
    assert records == {p.name: FileRecord(p.stat().st_size, compute_sha256(p)) for p in tmp_path.iterdir()}
    held = [set(load_file(path)) for path in tmp_path.glob("state_*.safetensors")]
    assert sum(len(names) for names in held) == len(TENSORS) and set.union(*held) == set(TENSORS)
    assert all(path.stat().st_size < 2 * 10_000 for path in tmp_path.glob("state_*"))
    of_ranks = [sum(r.bytes for n, r in report.files.items() if n.startswith("state_")) for report in reports]
    assert max(of_ranks) - min(of_ranks) < 2 * 64 * 24 * 4, "no more than about one tensor apart"
    files = StateFiles(tmp_path)
    assert files.num_steps == 7
    assert all(torch.equal(files.read(name, tensor.shape), tensor) for name, tensor in TENSORS.items())
    files.check_all_read()


def test_missing_misshapen_or_unknown_tensor_is_named(tmp_path: Path):
    write(tmp_path)
    files = StateFiles(tmp_path)
    with pytest.raises(CheckpointError, match=r"layer\.9\.weight"):
        files.read("layer.9.weight")
    with pytest.raises(CheckpointError, match=r"layer\.2\.weight .*\[64, 18\] .*\[64, 17\]"):
        files.read("layer.2.weight", torch.Size([64, 17]))
    for name in TENSORS.keys() - {"layer.4.weight"}:
        files.read(name)
    with pytest.raises(CheckpointError, match=r"layer\.4\.weight"):
        files.check_all_read()


def test_disk_error_is_raised_after_all_tensors_were_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that left early would keep its peers waiting in the next gather."""
    taken = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            taken.append(name)
            yield name, tensor

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_MAX_FILE_BYTES", 1)
    monkeypatch.setattr(storage.os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        write_state(tmp_path, tensors(), 7, 0, 2)
    assert taken == list(TENSORS)


def test_folder_of_other_release_error_suggests_fix(tmp_path: Path):
    (tmp_path / "old" / "sharded").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"written by an earlier release.*start from the export"):
        StateFiles(tmp_path / "old")
    write(tmp_path / "new")
    state = tmp_path / "new" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        StateFiles(tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        StateFiles(tmp_path / "nothing")


def test_new_rank_has_different_random_stream_than_rank_0(tmp_path: Path):
    write(tmp_path, 2)
    drawn = []
    for rank in (0, 1, 2):
        StateFiles(tmp_path).restore_random_state(rank)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1]), "both were written by this process"
    assert not torch.equal(drawn[0], drawn[2])
