"""Bytes in files."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tx.errors import ConfigError
from tx.tinker.storage.blobs import Blobs


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


@pytest.mark.parametrize("data", [b"", b"\0", bytes(3_000_000)])
def test_stored_blob_is_read_back(blobs: Blobs, data: bytes):
    assert blobs.get(blobs.put(data)) == data


def test_concurrent_puts_succeed_and_dropped_blob_is_removed(blobs: Blobs):
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda i: blobs.put(b"%d" % i), range(200)))
    assert [blobs.get(blob) for blob in ids] == [b"%d" % i for i in range(200)]
    assert blobs.all() == set(ids)
    for _ in range(2):  # dropping is idempotent
        blobs.drop(ids[0])
    with pytest.raises(FileNotFoundError):
        blobs.get(ids[0])
    assert blobs.all() == set(ids[1:])


def test_blobs_are_listed_by_minimum_age(blobs: Blobs, tmp_path: Path):
    old, young = blobs.put(b"a"), blobs.put(b"b")
    os.utime(tmp_path / "blobs" / old[:2] / old, (time.time() - 100,) * 2)
    assert blobs.all(min_age_seconds=50) == {old}
    assert blobs.all() == {old, young}


@pytest.mark.parametrize("name", ["", "..", "../../etc/passwd", "a" * 31, "A" * 32, "owner", "a" * 32 + "\n"])
def test_invalid_ids_reach_no_file(blobs: Blobs, name: str):
    for method in (blobs.get, blobs.drop):
        with pytest.raises(ValueError, match="not a blob id"):
            method(name)


def test_failing_disk_leaves_no_partial_blob(blobs: Blobs, tmp_path: Path):
    (tmp_path / "blobs" / ".partial").rmdir()
    with pytest.raises(OSError):
        blobs.put(b"a")
    assert blobs.all() == set()


def test_blobs_belong_to_claiming_database(blobs: Blobs, tmp_path: Path):
    blobs.claim("one")
    blobs.claim("one")
    with pytest.raises(ConfigError, match="belong to another database"):
        Blobs(tmp_path / "blobs").claim("other")
    partials = tmp_path / "blobs" / ".partial"
    for name in ("old", "young"):
        (partials / name).write_bytes(b"half")
    os.utime(partials / "old", (time.time() - 3600,) * 2)
    blobs.claim("one")  # removes what was half written long ago
    assert [path.name for path in partials.iterdir()] == ["young"]


def test_unwritable_blob_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="state_dir"):
        Blobs(tmp_path / "file" / "blobs")
