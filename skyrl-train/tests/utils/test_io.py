import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.utils.io import compute_sha256, expand_path, is_cloud_path, remove_leftovers, write_atomically


def test_file_is_replaced_atomically(tmp_path: Path):
    path = tmp_path / "state.txt"
    write_atomically(path, "old")
    write_atomically(path, b"new \xff")
    assert path.read_bytes() == b"new \xff"
    assert os.listdir(tmp_path) == ["state.txt"]


def test_written_file_has_default_permissions(tmp_path: Path):
    write_atomically(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


@contextmanager
def files_of_at_most_1000_bytes() -> Iterator[None]:
    """Refuse bytes after the first 1000, as on a full disk: the test's own output too, so not for longer than
    needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_keeps_old_file_only(tmp_path: Path):
    path = tmp_path / "state.txt"
    write_atomically(path, "old")
    with pytest.raises(OSError, match="File too large"), files_of_at_most_1000_bytes():
        write_atomically(path, bytes(1001))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.txt"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_write_error_keeps_old_file_only(tmp_path: Path, monkeypatch, failing: str):
    path = tmp_path / "state.txt"
    write_atomically(path, "old")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.txt"]


def test_temporary_files_of_killed_writer_are_removed(tmp_path: Path):
    (tmp_path / ".state.txt.0a1b2c3d.partial").write_text("hal")
    (tmp_path / ".hidden").write_text("somebody's")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [".hidden"]


def test_path_is_absolute_and_home_is_expanded(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert expand_path("~/runs/first") == Path("/home/ada/runs/first")
    assert expand_path("first") == tmp_path / "first"


@pytest.mark.parametrize(
    "path, expected", [("s3://b/k", True), ("gs://b", True), ("az://b", True), ("/s3/b", False), ("s3:/b", False)]
)
def test_cloud_paths_are_detected_by_scheme(path: str, expected: bool):
    assert is_cloud_path(path) is expected


def test_cloud_path_is_rejected_as_local_folder():
    with pytest.raises(ConfigError, match="s3://bucket/run"):
        expand_path("s3://bucket/run")


def test_sha256_matches_content(tmp_path: Path):
    (tmp_path / "empty").touch()
    assert compute_sha256(tmp_path / "empty") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
