"""Folders and files on a file system or in an object store (`s3://`, `gs://`, any fsspec URL). The only module that
distinguishes them; independent of checkpoints.

Objects are written atomically but cannot be renamed: a folder there is complete once its seal file, written last,
exists.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, Union

from skyrl_gym.waits import waiting
from skyrl_gym.whole_folders import replacing
from skyrl_train.errors import ConfigError
from skyrl_train.utils.io import add_path_to_errors, expand_path, is_cloud_path, write_atomically

if TYPE_CHECKING:
    from upath import UPath

Place: TypeAlias = Union[Path, "UPath"]  # UPath is only a name at run time: its package is optional
"""A folder or file, local or in an object store."""

_LOCAL_SCHEMES = ("file://", "local://")


def location(path: str | Place) -> Place:
    """Return the `Place` of a path or URL; `~/x` or `x` becomes absolute. Does not access it.

    Raises:
        ConfigError: the URL's scheme is unknown, or its package is not installed.
    """
    text = str(path)
    for scheme in _LOCAL_SCHEMES:
        text = text.removeprefix(scheme)
    if not is_cloud_path(text):
        return expand_path(text)
    try:
        from upath import UPath  # of the extra `cloud`

        place = UPath(text.rstrip("/"))
        _ = place.fs
    except ImportError as error:
        raise ConfigError(f"{path} needs a package that is missing ({error}): install skyrl-train[cloud]") from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither a folder nor a URL that fsspec supports: {error}") from error
    return place


def check_access(setting: str, path: str) -> None:
    """Raise ConfigError unless objects can be written to the URL of a setting. Does nothing for a local folder."""
    try:
        place = location(path)
        if not isinstance(place, Path):
            probe = place / f".write_check_{secrets.token_hex(4)}"
            replace_file(probe, b"checked")
            with _convert_errors(probe):
                probe.fs.rm_file(probe.path)
    except (ConfigError, OSError) as error:
        remedy = (
            ""
            if isinstance(error, ConfigError)
            else (". Check that the bucket exists and that the credentials in the environment allow writing to it")
        )
        raise ConfigError(f"{setting}={path} cannot be used: {error}{remedy}") from error


# ---- files


def read_text(file: Place) -> str:
    """Return the content of a file. Raises FileNotFoundError, OSError."""
    if isinstance(file, Path):
        return file.read_text()
    with _convert_errors(file):
        return file.read_text()


def replace_file(file: Place, content: bytes | str) -> None:
    """Write or replace a file atomically. Raises OSError."""
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
        return
    with _convert_errors(file):
        file.fs.pipe_file(file.path, content.encode() if isinstance(content, str) else content)


def write_durably(file: Place, content: bytes) -> None:
    """Write a file of an unpublished folder durably. Raises OSError."""
    with waiting("a write", on=f"file {file}"):
        if not isinstance(file, Path):
            replace_file(file, content)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with add_path_to_errors(file), open(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())


@contextmanager
def open_to_write(path: str | Place) -> Iterator[BinaryIO]:
    """Open a file, local or in an object store, for content of any length; its folder is created. Raises OSError."""
    file = location(path)
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
    with _convert_errors(file), file.open("wb") as opened:
        yield opened


def download(file: Place, target: Path) -> None:
    """Copy a file to a local one, whose folder is created. Raises FileNotFoundError, OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(file, Path):
        shutil.copyfile(file, target)
        return
    with _convert_errors(file):
        file.fs.get_file(file.path, str(target))


def get_size(file: Place) -> int | None:
    """Return the size of a file in bytes, uncached; None if it is missing. Raises OSError."""
    if isinstance(file, Path):
        return file.stat().st_size if file.is_file() else None
    with _convert_errors(file), suppress(FileNotFoundError):
        file.fs.invalidate_cache()
        return int(file.fs.info(file.path)["size"])
    return None


# ---- folders


def list_names(folder: Place) -> list[str]:
    """Return the names of files and folders in a folder, uncached; none if it is missing. Raises OSError."""
    if isinstance(folder, Path):
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    with _convert_errors(folder), suppress(FileNotFoundError):
        folder.fs.invalidate_cache()
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in folder.fs.ls(folder.path, detail=False))
    return []


def list_sizes(folder: Place) -> dict[str, int]:
    """Return the sizes of all files below a folder in bytes, by relative name. Raises OSError."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    with _convert_errors(folder):
        return {name: int(entry["size"]) for name, entry in _list_objects(folder).items()}


def remove_folder(folder: Place, seal: str) -> None:
    """Delete a folder, in an object store its `seal` file first: if killed in between, the folder is absent."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with _convert_errors(folder), suppress(FileNotFoundError):
        objects = _list_objects(folder)
        if seal in objects:
            folder.fs.rm_file(objects[seal]["name"])
        folder.fs.invalidate_cache()
        folder.fs.rm(folder.path, recursive=True)


def move_folder(folder: Place, target: Place, seal: str) -> None:
    """Rename a folder to `target`, which is replaced. In an object store: copy it, `seal` last, then delete it."""
    remove_folder(target, seal)
    if isinstance(folder, Path):
        folder.rename(str(target))
        return
    assert not isinstance(target, Path)
    with _convert_errors(folder):
        objects = _list_objects(folder)
        for name in sorted(objects, key=lambda name: name == seal):
            folder.fs.cp_file(objects[name]["name"], (target / name).path)
    remove_folder(folder, seal)


@dataclass(frozen=True)
class DraftFolder:
    """Folder that is being written.

    Args:
        local: for the files of this process.
        shared: for files of other processes and machines; the same folder on a file system.
    """

    local: Path
    shared: Place


@contextmanager
def publishing(place: Place, seal: str) -> Iterator[DraftFolder]:
    """Yield a folder to write to, which replaces `place` when the block succeeds.

    On a file system it is invisible before (`skyrl_gym.whole_folders`). In an object store files of other processes
    appear as they are written; when the block ends, files of this process follow, `seal` last. A folder to be replaced
    is deleted at the start.

    Args:
        seal: name of the file without which readers ignore the folder; the block writes it.
    """
    if isinstance(place, Path):
        with replacing(place) as partial:
            yield DraftFolder(partial, partial)
        return
    remove_folder(place, seal)  # also files of a killed process
    with tempfile.TemporaryDirectory(prefix="skyrl-upload-") as scratch:
        try:
            yield DraftFolder(Path(scratch), place)
            _upload(Path(scratch), place, seal)
        except BaseException:  # a KeyboardInterrupt must not leave a partial folder either
            with suppress(OSError):
                remove_folder(place, seal)
            raise


def _upload(folder: Path, target: "UPath", seal: str) -> None:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    with _convert_errors(target):
        for name in sorted(files, key=lambda name: name == seal):
            target.fs.put_file(str(files[name]), (target / name).path)


# ---- fsspec


def _list_objects(folder: "UPath") -> dict[str, Any]:
    """Return fsspec's entry of every object below a folder by relative name, uncached."""
    folder.fs.invalidate_cache()
    prefix = folder.path.rstrip("/") + "/"
    found: Any = folder.fs.find(folder.path, detail=True)
    return {key.removeprefix(prefix): entry for key, entry in found.items()}


@contextmanager
def _convert_errors(place: Place) -> Iterator[None]:
    """Convert errors of an object store's library to an OSError that names the place."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{place}: {error}") from error
    except PermissionError as error:
        raise PermissionError(f"{place}: {error}") from error
    except Exception as error:  # each library has its own errors: no credentials, no connection, a rejection
        named = OSError(f"{place}: {type(error).__name__}: {error}")
        named.errno = getattr(error, "errno", None)  # which identifies a full disk
        raise named from error
