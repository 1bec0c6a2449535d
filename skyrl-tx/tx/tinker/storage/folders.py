"""Atomic checkpoint folders: local, or fsspec URLs (`s3://`, `gs://`).

Local: a folder is filled under `BASE/.partial`, synced, and renamed to its location. An existing folder is exchanged
atomically (`whole_folders.exchange`), so a complete one exists at every moment; on file systems that cannot exchange
(NFS) the old one is removed just before the rename.

Both have a manifest with sizes and hashes of the files (`manifests`), which `verified` checks.

Remote: files are uploaded before the manifest; a folder without manifest does not exist. Replacement files have new
keys, so the old manifest stays valid until it is replaced.
"""

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_gym.whole_folders import exchange, fsync_folder, sync_tree
from tx.errors import ConfigError
from tx.tinker.storage.files import PARTIAL, create_scratch_folder, remove_leftovers, remove_tree
from tx.tinker.storage.manifests import list_files, verify, write_manifest
from tx.tinker.storage.remote import RemoteFolders

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,254}")
_LOCAL_SCHEMES = ("file://", "local://")


def remove_local_scheme(base: str) -> str:
    """Return a local folder of `--checkpoints-base` as a path; URLs of object stores unchanged."""
    for scheme in _LOCAL_SCHEMES:
        base = base.removeprefix(scheme)
    return base


class Folders:
    """
    Args:
        base: `--checkpoints-base`
        cache: a local folder for copies of remote ones; several processes may share it
        cache_bytes: size limit; copies used in the last minutes are kept beyond it
        read_only: create and remove nothing under a local base; folders may only be read

    Raises:
        ConfigError: the base cannot be written, its scheme is unknown or needs a package that is not installed.
    """

    def __init__(self, base: str, cache: Path, cache_bytes: int = 32 << 30, *, read_only: bool = False):
        self._remote: RemoteFolders | None = None
        base = remove_local_scheme(base)
        if "://" in base:
            self._remote = RemoteFolders(base, Path(cache).expanduser().absolute(), cache_bytes)
            self.base = base.rstrip("/")
            return
        folder = Path(base).expanduser().absolute()
        self.base = str(folder)
        self._partials = folder / PARTIAL
        if read_only:
            return
        try:
            self._partials.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints_base: {folder} cannot be written: {error}") from error
        remove_leftovers(self._partials)

    def place(self, *parts: str) -> str:
        """Return the folder (path or URL) for `parts` under the base; run ids may contain ':'.

        Raises:
            ValueError: a part is not a plain name.
        """
        for part in parts:
            if not _PART.fullmatch(part):
                raise ValueError(
                    "each component of a folder name must be 1 to 255 letters, digits and '_.:@-', beginning with a "
                    f"letter, digit or '_'; got {part[:80]!r}"
                )
        if not parts:
            raise ValueError("a folder below checkpoints_base needs a name")
        return "/".join((self.base, *parts))

    @contextmanager
    def writing(self, folder: str) -> Iterator[Path]:
        """Yield a new local folder to fill. On success it atomically and durably becomes `folder` (replacing a previous
        one); on an error it is removed. One writer per folder at a time.

        Raises:
            ValueError: the folder did not come from `place`.
            OSError: it could not be written or uploaded; the previous folder is kept.
        """
        self._check_ours(folder)
        if self._remote is not None:
            with self._remote.scratch() as scratch:
                yield scratch
                self._remote.upload(scratch, folder)
            return
        with create_scratch_folder(self._partials) as scratch:
            yield scratch
            write_manifest(scratch)
            sync_tree(scratch)
            self._move_into_place(scratch, Path(folder))

    def local(self, folder: str) -> Path:
        """Return a local copy to read (the folder itself if local; copies of remote folders are kept for minutes at
        least). Raises FileNotFoundError.
        """
        if self._remote is not None and "://" in folder:
            return self._remote.download(folder)
        return _check_exists(folder)

    def verified(self, folder: str) -> Path:
        """Return a local copy with every file verified against its checksum.

        Raises:
            FileNotFoundError: the folder does not exist.
            DamagedFilesError: some files differ.
        """
        if self._remote is not None and "://" in folder:
            return self._remote.download(folder, verified=True)
        local = _check_exists(folder)
        verify(local)
        return local

    def size(self, folder: str) -> int:
        """Return the bytes of its files. Raises FileNotFoundError."""
        if self._remote is not None and "://" in folder:
            return self._remote.size(folder)
        return sum(path.stat().st_size for path in list_files(_check_exists(folder)))

    def remove(self, folder: str) -> None:
        """Remove a folder atomically; idempotent.

        Raises:
            ValueError: the folder did not come from `place`.
        """
        self._check_ours(folder)
        if self._remote is not None:
            self._remote.remove(folder)
        else:
            remove_tree(Path(folder), self._partials)

    def archive(self, folder: str, to: Path) -> None:
        """Write a tar of its files (without a leading folder) to a local file. The same files give the same bytes.
        Raises as `verified`.
        """
        source = self.verified(folder)
        partial = to.with_name(to.name + PARTIAL)
        try:
            with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
                for path in list_files(source):
                    tar.add(path, arcname=path.relative_to(source).as_posix(), filter=_normalize_member)
            partial.rename(to)
        finally:
            partial.unlink(missing_ok=True)

    def _check_ours(self, folder: str) -> None:
        inside = folder.removeprefix(self.base + "/")
        if inside == folder or not all(_PART.fullmatch(part) for part in inside.split("/")):
            raise ValueError(f"{folder[:200]!r} is not a folder below checkpoints_base ({self.base})")

    def _move_into_place(self, scratch: Path, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            scratch.rename(place)
        elif not exchange(scratch, place):
            remove_tree(place, self._partials)
            scratch.rename(place)
        for parent in place.parents:  # of which some may be new
            fsync_folder(parent)
            if str(parent) == self.base:
                break


def _check_exists(folder: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    return path


def _normalize_member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode = 0, 0, 0, "", "", 0o644
    return member
