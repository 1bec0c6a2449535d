"""Storage for bytes too large for a row: one file each, written atomically, with generated names.

A blob is written under a temporary name, synced, and renamed before `put` returns its id. So a row never references a
missing blob, even after a kill or power cut. A crash may leave an unreferenced blob; `garbage.find_unreferenced_blobs`
finds those.

Every method may be called from any thread.
"""

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from skyrl_gym.whole_folders import fsync_folder
from tx.errors import ConfigError
from tx.tinker.storage.files import PARTIAL

_ID = re.compile(r"[0-9a-f]{32}")
_OWNER = "owner"
_LONGEST_PUT_SECONDS = 600
"""Age without a change from which a partial file counts as left by a killed process. Files of other processes are
judged by age alone, so that a second server that the database refuses a moment later does no harm."""


class Blobs:
    """Blob `abcdef…` is the file `ab/abcdef…`.

    Args:
        folder: on a local disk, used exclusively; created if missing.
        read_only: create nothing; only `get` and `has` may be called.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, read_only: bool = False):
        self._folder = Path(folder).expanduser().absolute()
        self._partials = self._folder / PARTIAL
        if read_only:
            return
        try:
            self._partials.mkdir(parents=True, exist_ok=True)
            for shard in range(256):
                (self._folder / f"{shard:02x}").mkdir(exist_ok=True)
            fsync_folder(self._folder)
        except OSError as error:
            raise ConfigError(f"state_dir: payloads cannot be written to {self._folder}: {error}") from error

    def claim(self, database_id: str) -> None:
        """Record the owner of these blobs (the first caller, permanently), and remove partial files of killed
        processes.

        Raises:
            ConfigError: they are another database's, which would lose them to our search for leftovers.
        """
        owner = self._folder / _OWNER
        if not owner.exists():
            partial = self._partials / secrets.token_hex(16)
            partial.write_text(database_id)
            partial.rename(owner)
        found = owner.read_text()
        if found != database_id:
            raise ConfigError(
                f"state_dir: the payloads in {self._folder} belong to another database ({found}, and this is "
                f"{database_id}); use a separate state_dir for each database_url"
            )
        for entry in os.scandir(self._partials):
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - _LONGEST_PUT_SECONDS:
                    os.unlink(entry)

    def put(self, data: bytes) -> str:
        """Write a blob and return its id. Durable when it returns.

        Raises:
            OSError: the write failed (for example disk full); no partial blob is left.
        """
        blob = secrets.token_hex(16)
        partial = self._partials / blob
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self._get_path(blob))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_folder(self._get_path(blob).parent)
        return blob

    def get(self, blob: str) -> bytes:
        """Read a blob. Raises FileNotFoundError if it was removed, ValueError for an invalid id."""
        return self._get_path(blob).read_bytes()

    def has(self, blob: str) -> bool:
        """Return True if a blob exists."""
        return self._get_path(blob).is_file()

    def drop(self, blob: str) -> None:
        """Delete a blob; idempotent."""
        self._get_path(blob).unlink(missing_ok=True)

    def all(self, min_age_seconds: float = 0.0) -> set[str]:
        """Return the blobs of at least this age, to find leftovers."""
        newest = time.time() - min_age_seconds
        found = set()
        for shard in self._folder.iterdir():
            if len(shard.name) != 2:
                continue
            for entry in os.scandir(shard):
                with suppress(FileNotFoundError):  # dropped while we look
                    if not min_age_seconds or entry.stat().st_mtime <= newest:
                        found.add(entry.name)
        return found

    def _get_path(self, blob: str) -> Path:
        if not _ID.fullmatch(blob):
            raise ValueError(f"not a blob id: {blob[:80]!r}")
        return self._folder / blob[:2] / blob
