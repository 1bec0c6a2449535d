"""Checkpoint folders, on disk and in an object store (fsspec's, in memory)."""

import hashlib
import os
import secrets
import tarfile
import threading
import time
from pathlib import Path

import fsspec
import pytest

from skyrl_gym import whole_folders
from tx.errors import ConfigError
from tx.tinker.storage import remote
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import MANIFEST, DamagedFilesError, list_files

RUN = "session_00aa:train:0"


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "base") if request.param == "local" else f"memory://{secrets.token_hex(4)}/checkpoints"


@pytest.fixture
def folders(base: str, tmp_path: Path) -> Folders:
    return Folders(base, tmp_path / "cache")


def write(folders: Folders, folder: str, text: str) -> str:
    with folders.writing(folder) as path:
        (path / "adapter.txt").write_text(text)
        (path / "deep").mkdir()
        (path / "deep" / "state.txt").write_text(text * 2)
    return folder


def texts(path: Path) -> list[str]:
    return [(path / "adapter.txt").read_text(), (path / "deep" / "state.txt").read_text()]


def test_written_folder_is_read_back(folders: Folders, base: str):
    folder = folders.place(RUN, "weights", "step-1.5")
    assert folder == f"{base}/{RUN}/weights/step-1.5"
    write(folders, folder, "abc")
    assert texts(folders.local(folder)) == ["abc", "abcabc"]
    assert folders.size(folder) == 9


def test_folder_is_replaced_atomically(folders: Folders):
    folder = folders.place(RUN, "weights", "a")
    for text in ("first", "second", "third"):
        with folders.writing(folder) as path:
            (path / text).write_text(text)
        assert [path.name for path in list_files(folders.local(folder))] == [text]


def test_failed_write_keeps_previous_folder(folders: Folders):
    folder = folders.place(RUN, "weights", "a")
    for _ in range(2):
        with pytest.raises(OSError, match="full"), folders.writing(folder) as path:
            (path / "adapter.txt").write_text("half")
            raise OSError("disk full")
        with pytest.raises(FileNotFoundError):
            folders.local(folder)
    write(folders, folder, "a")
    with pytest.raises(OSError, match="full"), folders.writing(folder) as path:
        (path / "adapter.txt").write_text("half")
        raise OSError("disk full")
    assert texts(folders.local(folder)) == ["a", "aa"]


def test_removed_folder_is_deleted_and_remove_is_idempotent(folders: Folders):
    kept = write(folders, folders.place(RUN, "weights", "a"), "a")
    removed = write(folders, folders.place(RUN, "weights", "ab"), "b")
    folders.remove(removed)
    folders.remove(removed)
    for method in (folders.local, folders.size):
        with pytest.raises(FileNotFoundError):
            method(removed)
    assert texts(folders.local(kept)) == ["a", "aa"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_local_files_are_named_and_never_archived(tmp_path: Path):
    folders = Folders(str(tmp_path / "base"), tmp_path / "cache")
    folder = write(folders, folders.place(RUN, "weights", "a"), "abc")
    assert texts(folders.verified(folder)) == ["abc", "abcabc"]
    flip_a_byte(Path(folder, "adapter.txt"))
    Path(folder, "deep", "state.txt").write_text("longer than before")
    for attempt in (folders.verified, lambda folder: folders.archive(folder, tmp_path / "a.tar")):
        with pytest.raises(DamagedFilesError) as error:
            attempt(folder)
        assert "adapter.txt is damaged" in str(error.value)
        assert "deep/state.txt has 18 bytes instead of 6" in str(error.value)
        assert str(tmp_path) not in str(error.value), "clients read it"
    Path(folder, "adapter.txt").unlink()
    with pytest.raises(DamagedFilesError, match=r"adapter\.txt is missing"):
        folders.verified(folder)
    Path(folder, MANIFEST).write_text('{"files": {"adapter.txt": 3}}')
    with pytest.raises(DamagedFilesError, match=r"tx_manifest\.json"):
        folders.verified(folder)
    Path(folder, MANIFEST).unlink()
    folders.verified(folder)  # of a release without checksums


def test_archive_contains_files_without_dates(folders: Folders, tmp_path: Path):
    folder = folders.place(RUN, "weights", "a")
    digests = set()
    for _ in range(2):
        write(folders, folder, "abc")
        folders.archive(folder, tmp_path / "a.tar")
        digests.add(hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest())
        for path in folders.local(folder).rglob("*"):
            os.utime(path, (time.time() - 1000,) * 2)
    assert len(digests) == 1
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getnames() == ["adapter.txt", "deep/state.txt"]
        assert [file.read().decode() for name in tar.getnames() if (file := tar.extractfile(name))] == ["abc", "abcabc"]
    with pytest.raises(FileNotFoundError):
        folders.archive(folders.place(RUN, "none"), tmp_path / "b.tar")
    assert sorted(path.name for path in tmp_path.glob("*.tar*")) == ["a.tar"]


@pytest.mark.parametrize(
    "part", ["", ".", "..", "a/b", "/etc", "a\\b", "a\0b", "a\n", ".partial", "-a", "a*", "~", "é", "x" * 256]
)
def test_names_cannot_escape_base(folders: Folders, part: str):
    with pytest.raises(ValueError, match="component of a folder name"):
        folders.place(RUN, part)


@pytest.mark.parametrize(
    "folder", ["{base}", "{base}/", "{base}/../x", "{base}/a//b", "{base}x/a", "/", "", "{base}/.partial/x"]
)
def test_only_places_are_written_or_removed(folders: Folders, folder: str):
    folder = folder.format(base=folders.base)
    for attempt in (folders.remove, lambda folder: write(folders, folder, "")):
        with pytest.raises(ValueError, match="checkpoints_base"):
            attempt(folder)


def test_reader_always_finds_complete_folder(tmp_path: Path):
    """The folder is replaced again and again meanwhile, under one name."""
    folders = Folders(str(tmp_path / "base"), tmp_path / "cache")
    folder = write(folders, folders.place("a"), "0")
    done = threading.Event()
    seen = set()

    def read() -> None:
        while not done.is_set():
            descriptor = os.open(folder, os.O_RDONLY)  # pins the current folder across renames
            try:
                with open(os.open("adapter.txt", os.O_RDONLY, dir_fd=descriptor)) as file:
                    seen.add(file.read())
            except FileNotFoundError:
                pass  # the replaced one, while it is removed
            finally:
                os.close(descriptor)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 30):
        write(folders, folder, str(i))
    done.set()
    reader.join()
    assert len(seen) > 1
    assert texts(Path(folder)) == ["29", "2929"]
    assert list((tmp_path / "base" / ".partial").iterdir()) == []


def test_folders_are_replaced_even_if_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(whole_folders, "_RENAME_SWAP", 1 << 20)  # a flag that no kernel knows: EINVAL
    folders = Folders(str(tmp_path / "base"), tmp_path / "cache")
    for text in ("a", "b"):
        folder = write(folders, folders.place("x"), text)
        assert texts(folders.local(folder)) == [text, text * 2]


def test_leftovers_of_dead_writers_are_removed_and_live_files_kept(tmp_path: Path):
    folders = Folders(str(tmp_path / "base"), tmp_path / "cache")
    partials = tmp_path / "base" / ".partial"
    (partials / "dead").mkdir()
    (partials / "dead" / "half").write_text("half")
    with folders.writing(folders.place("a")) as path:
        (path / "adapter.txt").write_text("a")
        Folders(str(tmp_path / "base"), tmp_path / "cache")
        assert list(partials.iterdir()) == [path.parent]
    assert (folders.local(folders.place("a")) / "adapter.txt").read_text() == "a"


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("nowhere://bucket/x", "nor a URL that fsspec supports"),
        ("az://bucket/x", "pip install 'adlfs'"),
        ("{tmp_path}/file/base", "checkpoints_base"),
    ],
)
def test_unusable_base_is_refused_and_file_url_is_local(tmp_path: Path, base: str, says: str):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=says):
        Folders(base.format(tmp_path=tmp_path), tmp_path / "cache")
    folders = Folders(f"file://{tmp_path / 'base'}", tmp_path / "cache")
    assert folders.place("a") == str(tmp_path / "base" / "a")


class TestRemote:
    @pytest.fixture
    def base(self) -> str:
        return f"memory://{secrets.token_hex(4)}/checkpoints"

    def test_folder_without_manifest_does_not_exist(self, folders: Folders):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        fsspec.filesystem("memory").rm_file(f"{folder}/{remote.MANIFEST}")
        with pytest.raises(FileNotFoundError):
            folders.local(folder)

    def test_first_remote_folder_has_plain_names(self, folders: Folders):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        found = fsspec.filesystem("memory").find(folder)
        assert sorted(path.split("/a/")[1] for path in found) == ["adapter.txt", "deep/state.txt", remote.MANIFEST]

    def test_interrupted_upload_keeps_previous_folder(self, folders: Folders, monkeypatch: pytest.MonkeyPatch):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        store = fsspec.filesystem("memory")
        put_file = type(store).put_file

        def breaks_off(self: object, source: str, target: str, **options: object) -> None:
            if target.endswith("state.txt"):
                raise ConnectionError("gone")
            put_file(self, source, target, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(store), "put_file", breaks_off)
            with pytest.raises(ConnectionError):
                write(folders, folder, "b")
        assert texts(folders.local(folder)) == ["a", "aa"]
        write(folders, folder, "c")
        assert texts(folders.local(folder)) == ["c", "cc"]

    def test_damaged_remote_file_is_reported(self, folders: Folders):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        fsspec.filesystem("memory").pipe_file(f"{folder}/adapter.txt", b"b")
        with pytest.raises(DamagedFilesError, match=r"adapter\.txt is damaged"):
            folders.local(folder)

    def test_damaged_cached_copy_is_downloaded_again(self, folders: Folders):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        flip_a_byte(folders.local(folder) / "adapter.txt")
        assert texts(folders.verified(folder)) == ["a", "aa"]

    def test_remote_folder_is_downloaded_once(self, folders: Folders):
        folder = write(folders, folders.place(RUN, "weights", "a"), "a")
        copy = folders.local(folder)
        fsspec.filesystem("memory").rm_file(f"{folder}/adapter.txt")
        assert folders.local(folder) == copy
        assert texts(copy) == ["a", "aa"]

    def test_cache_evicts_least_recently_used(self, base: str, tmp_path: Path):
        folders = Folders(base, tmp_path / "cache", cache_bytes=2000)
        copies = {}
        for number, name in enumerate("abc"):
            with folders.writing(folders.place(name)) as path:
                (path / "file").write_bytes(bytes([number]) * 800)
        for name in "ab":
            copies[name] = folders.local(folders.place(name))
        os.utime(copies["a"], (time.time() - 2000,) * 2)
        os.utime(copies["b"], (time.time() - 3000,) * 2)
        copies["c"] = folders.local(folders.place("c"))
        assert {name: copy.exists() for name, copy in copies.items()} == {"a": True, "b": False, "c": True}
        assert folders.local(folders.place("b")).exists()
