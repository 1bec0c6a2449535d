"""One process of a machine downloads, others share the copy, the last deletes it; damage and kills leave nothing."""

from pathlib import Path

import pytest

from skyrl_train.errors import CheckpointError
from skyrl_train.utils import shared_download
from skyrl_train.utils.io import FileRecord, compute_sha256
from skyrl_train.utils.shared_download import SharedDownload


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FileRecord]:
    """Two files in `tmp_path/source`; temporary files go to `tmp_path/temporary`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(shared_download.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        (tmp_path / "source" / name).write_text(name)
    return {name: FileRecord(1, compute_sha256(tmp_path / "source" / name)) for name in ("a", "b")}


def copies(tmp_path: Path) -> list[Path]:
    return [path for root in (tmp_path / "temporary").iterdir() for path in root.iterdir()]


def test_shared_copy_is_deleted_by_last_reader(tmp_path: Path, records: dict[str, FileRecord]):
    first = SharedDownload(tmp_path / "source", records)
    (tmp_path / "source" / "a").unlink()  # a second download would fail
    second = SharedDownload(tmp_path / "source", records)
    assert first.folder == second.folder
    first.release()
    assert (second.folder / "a").read_text() == "a"
    second.release()
    assert copies(tmp_path) == []


def test_corruption_is_named_and_nothing_is_kept(tmp_path: Path, records: dict[str, FileRecord]):
    (tmp_path / "source" / "b").write_text("x")
    with pytest.raises(CheckpointError, match=r"source/b .*hash"):
        SharedDownload(tmp_path / "source", records)
    (tmp_path / "source" / "b").unlink()
    with pytest.raises(CheckpointError, match="source/b is missing"):
        SharedDownload(tmp_path / "source", records)
    assert copies(tmp_path) == []


def test_orphaned_copy_is_deleted_and_used_copy_is_kept(tmp_path: Path, records: dict[str, FileRecord]):
    used = SharedDownload(tmp_path / "source", records)
    killed = used.folder.with_name("of_a_killed_process")
    killed.mkdir()
    for name in (".lock", "a"):
        (killed / name).touch()
    other = SharedDownload(tmp_path / "source", {"a": records["a"]})
    assert sorted(copies(tmp_path)) == sorted([used.folder, other.folder])
    used.release()
    other.release()
    assert copies(tmp_path) == []
