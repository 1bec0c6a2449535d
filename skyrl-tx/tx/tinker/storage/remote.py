"""Folders in an object store (fsspec), with a bounded local cache. Independent of the files' contents."""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from tx.errors import ConfigError
from tx.tinker.storage.files import PARTIAL, create_scratch_folder, remove_leftovers, remove_tree
from tx.tinker.storage.manifests import (
    MANIFEST,
    DamagedFilesError,
    compute_sha256,
    describe_files,
    encode_manifest,
    find_damage,
)

log = logging.getLogger(__name__)

_IN_USE_SECONDS = 600
"""A copy that was asked for so recently may just be read: it stays in the cache whatever its size."""
_DRIVERS = {"s3": "skyrl-tx[aws]", "s3a": "skyrl-tx[aws]", "gs": "skyrl-tx[gcp]", "gcs": "skyrl-tx[gcp]", "az": "adlfs"}


class RemoteFolders:
    """
    Args:
        base: an fsspec URL
        cache: local folder of copies, each named by the hash of its manifest, so copies never become stale
        cache_bytes: limit beyond which least recently used copies are evicted

    Raises:
        ConfigError: the scheme is unknown, or its package is not installed; the cache cannot be written.
    """

    def __init__(self, base: str, cache: Path, cache_bytes: int):
        scheme = base.split("://")[0]
        try:
            self._fs: Any = url_to_fs(base)[0]
        except ImportError as error:
            raise ConfigError(
                f"checkpoints_base: {scheme}:// needs a package that is not installed; pip install "
                f"'{_DRIVERS.get(scheme, 'its fsspec package')}' ({error})"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"checkpoints_base: {base} is neither a folder nor a URL that fsspec supports: {error}"
            ) from error
        self._cache, self._cache_bytes = cache, cache_bytes
        self._partials = cache / PARTIAL
        try:
            self._partials.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"state_dir: copies of checkpoints cannot be written to {cache}: {error}") from error
        remove_leftovers(self._partials)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Create a local folder to fill."""
        with create_scratch_folder(self._partials) as folder:
            yield folder

    def upload(self, source: Path, folder: str) -> None:
        """Make the remote folder equal to the local one: upload files, then the manifest, then remove files that only
        the previous manifest names.
        """
        before = self._read_manifest(folder)
        prefix = f"{secrets.token_hex(8)}/" if before else ""  # plain names as long as nothing is replaced
        files = {name: facts | {"key": prefix + name} for name, facts in describe_files(source).items()}
        for name, facts in files.items():
            self._fs.put_file(str(source / name), f"{folder}/{facts['key']}")
        self._fs.pipe_file(f"{folder}/{MANIFEST}", encode_manifest(files))
        self._remove_files(folder, [file["key"] for file in json.loads(before or '{"files": {}}')["files"].values()])

    def download(self, folder: str, *, verified: bool = False) -> Path:
        """Return a local copy, from the cache if it is current.

        Args:
            verified: also verify a cached copy; a damaged one is downloaded again

        Raises:
            FileNotFoundError: the folder does not exist.
            DamagedFilesError: a remote file differs from the manifest.
        """
        manifest = self._read_manifest(folder)
        if manifest is None:
            raise FileNotFoundError(f"no folder {folder}")
        copy = self._cache / hashlib.sha256(manifest).hexdigest()
        if verified and (damage := list(find_damage(copy))):
            log.warning("%s, a copy of %s, is downloaded again: %s", copy, folder, "; ".join(damage))
            remove_tree(copy, self._partials)
        if not self._update_last_use(copy):
            with self.scratch() as scratch:
                for name, file in json.loads(manifest)["files"].items():
                    self._download_file(f"{folder}/{file['key']}", scratch / name, name, file["sha256"])
                (scratch / MANIFEST).write_bytes(manifest)
                if not self._update_last_use(copy):  # another process was faster
                    scratch.rename(copy)
            self._make_room(copy)
        return copy

    def size(self, folder: str) -> int:
        """Return the bytes of its files. Raises FileNotFoundError."""
        manifest = self._read_manifest(folder)
        if manifest is None:
            raise FileNotFoundError(f"no folder {folder}")
        return sum(file["size"] for file in json.loads(manifest)["files"].values())

    def remove(self, folder: str) -> None:
        """Delete a folder, its manifest first, if it exists."""
        self._remove_files(folder, [MANIFEST])
        self._remove_files(folder, None)

    def _read_manifest(self, folder: str) -> bytes | None:
        try:
            return self._fs.cat_file(f"{folder}/{MANIFEST}")
        except FileNotFoundError:
            return None

    def _remove_files(self, folder: str, keys: list[str] | None) -> None:
        """Remove some files of a folder, or all; missing ones are no error."""
        paths = self._fs.find(folder) if keys is None else [f"{folder}/{key}" for key in keys]
        for path in paths:
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                continue

    def _download_file(self, url: str, to: Path, name: str, sha256: str) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(url, str(to))
        if compute_sha256(to) != sha256:
            log.error("%s does not match its manifest: it is damaged or was overwritten", url)
            raise DamagedFilesError(f"{name} is damaged (its sha256 differs from the saved file's)")

    def _update_last_use(self, copy: Path) -> bool:
        """Update the time of last use of a copy. Returns False if it does not exist."""
        try:
            os.utime(copy)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, newest: Path) -> None:
        copies = sorted((path for path in self._cache.iterdir() if path.name != PARTIAL), key=_get_last_use)
        sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in copies}
        total = sum(sizes.values())
        for path in copies:
            if total <= self._cache_bytes:
                return
            if path != newest and _get_last_use(path) < time.time() - _IN_USE_SECONDS:
                remove_tree(path, self._partials)
                total -= sizes[path]


def _get_last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process made room
        return 0.0
