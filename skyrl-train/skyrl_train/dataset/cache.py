"""Cache of tokenized rows: Arrow files, written as a stream and memory-mapped, so that no process holds the rows.

A file is named by a fingerprint of everything that determines its content (the source's content, tokenizer, chat
template, settings, versions, this code), and is written atomically: concurrent runs write the same file one after the
other. Datasets of `datasets` would infer types of JSON columns again (rows would change), hide errors of a row behind
their own, and parallelize by forking next to a tokenizer's threads. Independent of chat messages.
"""

import errno
import hashlib
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count, environ
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
from loguru import logger

from skyrl_gym.whole_folders import TEMPORARY_SUFFIX
from skyrl_train.errors import DataError
from skyrl_train.types import JsonObject
from skyrl_train.utils.io import expand_path, open_atomically, write_atomically

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = min(32, cpu_count() or 1)
"""Tokenizer threads. No processes: forking next to threads of Ray or a tokenizer may deadlock."""

SETTING = "data.cache_dir"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ABANDONED_SECONDS = 24 * 3600.0
"""Age at which an unfinished file counts as abandoned: a live writer writes continuously."""


# ---- files


class ArrowRows:
    """Rows of Arrow files. Args: `batches`, memory-mapped."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)

    @classmethod
    def open(cls, path: Path) -> "ArrowRows":
        """Map a file. Raises OSError or pyarrow.ArrowInvalid if it cannot be read."""
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return cls([reader.get_batch(number) for number in range(reader.num_record_batches)])

    @classmethod
    def concatenated(cls, parts: Iterable["ArrowRows"]) -> "ArrowRows":
        """Return the concatenated rows of several files."""
        return cls([batch for part in parts for batch in part._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> pa.RecordBatch:
        """Return a row; `index` is from 0 to the number of rows - 1."""
        # The first batch that ends after it.
        number = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[number]
        return batch.slice(index - int(self._ends[number]) + batch.num_rows, 1)

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers. Only its part of the files is read."""
        return np.concatenate([batch.column(name).to_numpy() for batch in self._batches])


class RowCache:
    """Folder of tokenized rows.

    Args:
        folder: `data.cache_dir`; None: the datasets cache of Hugging Face (`HF_DATASETS_CACHE`).
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = expand_path(folder) if folder else _get_default_folder()

    def rows(self, label: str, fingerprint: str | None, build: Callable[[], Iterator[pa.RecordBatch]]) -> ArrowRows:
        """Return the rows with a fingerprint, cached or built now.

        Args:
            label: name of the source, for the log.
            fingerprint: None if unknown: the rows are then stored in a temporary file.
            build: yields the rows in batches.

        Raises:
            DataError: no disk space.
        """
        if fingerprint is None:
            logger.info("{}: not cached, because the tokenizer's source cannot be read to detect changes", label)
            return _build_temporary_rows(label, build)
        path = self.folder / f"{fingerprint}.arrow"
        try:
            found = ArrowRows.open(path)
            logger.info("{}: {} tokenized rows read from the cache {}", label, len(found), path)
            return found
        except FileNotFoundError:
            pass
        except (OSError, pa.ArrowInvalid) as error:
            logger.warning("{}: {} cannot be read and will be rewritten ({})", label, path, error)
        started = time.monotonic()
        # No lock: a concurrent run that builds the same rows writes a separate file, and the last one stays. Earlier
        # mapped files exist until their last reader exits.
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            with open_atomically(path) as file:
                _write(file, build())
                size = file.tell()
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise _build_no_space_error(label, self.folder, error) from error
            logger.warning(
                "{}: the cache {} cannot be written ({}), so the next run tokenizes again; set {} to another folder",
                label, self.folder, error, SETTING,
            )  # fmt: skip
            return _build_temporary_rows(label, build)
        seconds = time.monotonic() - started
        logger.info("{}: tokenized in {:.1f} s, cached in {} ({:.1f} MB)", label, seconds, path, size / 1e6)
        return ArrowRows.open(path)

    def summary(self, rows: str | None, name: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """Return JSON values derived from rows; computed once if the folder is writable.

        Args:
            rows: identifier of the rows; None: always compute.
        """
        if rows is None:
            return compute()
        path = self.folder / f"{hashlib.sha256(f'{rows} {name}'.encode()).hexdigest()[:32]}.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            values = compute()
        try:
            write_atomically(path, json.dumps(values))
        except OSError as error:
            logger.debug("{} cannot be written: {}", path, error)
        return values

    def _remove_abandoned(self) -> None:
        """Remove files of killed writers."""
        for file in self.folder.glob(f".*{TEMPORARY_SUFFIX}"):
            try:
                if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                    file.unlink()
            except FileNotFoundError:  # another run was faster
                continue


def _get_default_folder() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser().absolute() / "skyrl_train"


def _write(file: IO[bytes], batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with pa.ipc.new_file(file, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _build_temporary_rows(label: str, build: Callable[[], Iterator[pa.RecordBatch]]) -> ArrowRows:
    """Return rows in an unnamed file that is deleted when this process exits."""
    try:
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            _write(file, build())  # pyright: ignore[reportArgumentType]
            file.flush()
            return ArrowRows.open(Path(file.name))
    except OSError as error:
        raise _build_no_space_error(label, tempfile.gettempdir(), error) from error


def _build_no_space_error(label: str, folder: object, error: OSError) -> DataError:
    return DataError(
        f"{label}: tokenized rows cannot be written into {folder} ({error}); free disk space, or set {SETTING} to a "
        "folder on another disk"
    )


# ---- order


def map_in_threads(convert: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """Yield `convert` of each item, in order. Buffers only as many items as keep the threads busy."""
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(convert, item))
            # Waits until there are more items than threads, or one of them would wait for the next.
            if len(pending) > num_workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
