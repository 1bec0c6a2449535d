"""Versions on disk are what any server loads, appear complete, and go when they are no longer needed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.checkpoint import INDEX, CheckpointReader, CheckpointVersion, CheckpointWriter
from skyrl_train.weight_sync.payload import Payload, split_bytes
from skyrl_train_testing.weight_holders import WeightHolder

WEIGHTS = [("a.weight", torch.arange(6.0).view(2, 3).bfloat16()), ("b", torch.tensor(7)), ("c", torch.ones(3))]


def write(directory: Path, version: int) -> list[Path]:
    folder = CheckpointVersion(directory, version)
    folder.add(Payload.of(WEIGHTS[:2]))
    folder.add(Payload.of(WEIGHTS[2:]))
    return folder.publish()


def test_files_are_valid_safetensors_and_index_lists_every_tensor(tmp_path):
    files = write(tmp_path, 3)
    assert [file.name for file in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    loaded = load_file(files[0]) | load_file(files[1])
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in WEIGHTS)
    index = json.loads((tmp_path / "3" / INDEX).read_text())
    assert index["weight_map"] == {"a.weight": files[0].name, "b": files[0].name, "c": files[1].name}
    assert index["metadata"]["total_size"] == 12 + 8 + 12


def test_version_appears_only_when_complete(tmp_path):
    folder = CheckpointVersion(tmp_path, 3)
    folder.add(Payload.of(WEIGHTS))
    assert not (tmp_path / "3").exists()
    folder.publish()
    assert (tmp_path / "3" / INDEX).exists()


def test_partial_files_of_killed_trainer_are_rewritten(tmp_path):
    CheckpointVersion(tmp_path, 3).add(Payload.of(WEIGHTS))
    assert len(write(tmp_path, 3)) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]


def test_reader_returns_file_bytes(tmp_path):
    files = write(tmp_path, 1)
    request = Payload.of(WEIGHTS[:2]).request(version=1, index=0, location=str(files[0]))
    received = split_bytes(request, CheckpointReader().read(request))
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(received, WEIGHTS[:2], strict=True))


def test_missing_directory_is_created(tmp_path):
    payload = Payload.of(WEIGHTS[:1])
    place = CheckpointWriter(str(tmp_path / "run" / "weights")).write(payload, 1, 0)
    request = payload.request(version=1, index=0, **place)
    [(_, received)] = split_bytes(request, CheckpointReader().read(request))
    assert torch.equal(received, WEIGHTS[0][1])


def test_missing_or_truncated_file_is_named(tmp_path):
    files = write(tmp_path, 1)
    payload = Payload.of(WEIGHTS[:2])
    missing = payload.request(version=1, index=0, location=str(tmp_path / "9" / "x.safetensors"))
    with pytest.raises(WeightSyncError, match=r"generator\.weight_sync_directory"):
        CheckpointReader().read(missing)
    short = payload.request(version=1, index=0, location=str(files[1]))
    with pytest.raises(WeightSyncError, match=r"12 bytes .*bucket 0 of version 1 .*20"):
        CheckpointReader().read(short)


def test_old_versions_are_removed_after_all_engines_have_later_version(tmp_path):
    for version in (1, 2, 10):
        write(tmp_path, version)
    (tmp_path / "notes").mkdir()  # not ours
    (tmp_path / "7.unfinished").mkdir()
    CheckpointWriter(str(tmp_path)).finish(10)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10", "notes"]


def test_previous_version_is_kept_until_engines_finish(connect, tmp_path):
    engine = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in WEIGHTS)
    sender = connect(("checkpoint", "full"), engine)
    folder = tmp_path / "weights"
    sender.send(WEIGHTS, 1)
    sender.stage(WEIGHTS, 2)
    assert sorted(entry.name for entry in folder.iterdir()) == ["1", "2"]
    sender.send(None, 2)
    assert [entry.name for entry in folder.iterdir()] == ["2"]


def test_full_or_unwritable_directory_is_named(connect, tmp_path):
    engine = WeightHolder((name, torch.zeros_like(tensor)) for name, tensor in WEIGHTS)
    sender = connect(("checkpoint", "full"), engine)
    (tmp_path / "weights").write_text("a file where the folder should be")
    with pytest.raises(WeightSyncError, match=r"generator\.weight_sync_directory"):
        sender.stage(WEIGHTS, 1)
