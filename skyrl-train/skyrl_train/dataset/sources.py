"""Rows of files and of hub datasets, read in chunks. Independent of tokenizers."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet

from skyrl_gym.arrow_nulls import remove_null_fields
from skyrl_train.dataset.json_list import iter_list_items
from skyrl_train.errors import DataError

Row = dict[str, Any]

FILE_SUFFIXES = (".parquet", ".json", ".jsonl")
OWN_COLUMN = "skyrl:"
"""Prefix of internal column names in a stored batch."""
LENGTH = f"{OWN_COLUMN}length"
"""Column of prompt lengths in tokens."""

_JSON = f"{OWN_COLUMN}json"
"""Column of rows as JSON texts: rows of a JSON file may differ in keys and types, which no Arrow type supports."""
OWN_COLUMNS = (LENGTH, _JSON)
_CHUNK_ROWS = 512
_CHUNK_BYTES = 2_000_000
_BLOCK_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Consecutive rows of a source."""

    first_row: int
    rows: list[Row]
    stored: pa.RecordBatch
    """The same rows for an Arrow file, from which `rows_of` restores them."""


class Source(Protocol):
    """A file, or a dataset of the hub.

    Raises:
        DataError: from both methods, the source cannot be read or has no rows.
    """

    def digest(self) -> tuple[str, int | None]:
        """Return a hash of the content, and the approximate number of rows (None: unknown before they are read)."""
        ...

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows, some hundred at a time."""
        ...


def open_source(name: str) -> Source:
    """Return a source by its name: a path that ends with one of `FILE_SUFFIXES`, or `name[:split]` of the hub."""
    return FileSource(name) if name.endswith(FILE_SUFFIXES) else HubSource(name)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a stored batch, without internal columns."""
    if _JSON in batch.schema.names:
        return [json.loads(text) for text in batch.column(_JSON).to_pylist()]
    return _remove_null_fields(batch.select([name for name in batch.schema.names if name not in OWN_COLUMNS]))


class FileSource:
    """Rows of a `.parquet`, `.json` or `.jsonl` file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = Path(name).expanduser()
        if not self._path.is_file():
            raise DataError(f"{name}: no such file (looked for {self._path.absolute()})")
        self._state = self._get_stat()

    def digest(self) -> tuple[str, int | None]:
        sha256, num_lines = hashlib.sha256(self._path.suffix.encode()), 0
        try:
            with open(self._path, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    sha256.update(block)
                    num_lines += block.count(b"\n")
        except OSError as error:
            raise DataError(f"{self._name}: cannot be read: {error}") from error
        return sha256.hexdigest(), num_lines if self._path.suffix == ".jsonl" else None

    def chunks(self) -> Iterator[Chunk]:
        read = _read_parquet if self._path.suffix == ".parquet" else _read_json
        try:
            yield from _number_rows(self._name, read(self._name, self._path))
        except (OSError, pa.ArrowException, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._name}: cannot be read: {error}") from error
        if self._get_stat() != self._state:  # the digest may belong to other rows
            raise DataError(f"{self._name}: the file changed while it was read; restart when it is complete")

    def _get_stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


class HubSource:
    """Rows of a dataset of the hub, `name` (split `train`) or `name:split`."""

    def __init__(self, source: str) -> None:
        import datasets  # heavy, and only needed here
        from datasets.exceptions import DatasetsError

        name, _, split = source.partition(":")
        split = split or "train"
        try:
            found = datasets.load_dataset(name)
        except (OSError, ValueError, DatasetsError) as error:
            raise DataError(
                f"{source}: cannot be loaded as a hub dataset ({error}). (A file must end with one of "
                f"{', '.join(FILE_SUFFIXES)}.)"
            ) from error
        if split not in found:
            raise DataError(f"{source}: Split `{split}` not found; the dataset has {', '.join(map(str, found))}")
        self._name, self._rows = source, found[split]

    def digest(self) -> tuple[str, int | None]:
        sha256 = hashlib.sha256(repr(self._rows.features).encode())
        for part in self._load_parts():
            for batch in part.with_format("arrow")[:].to_batches():
                sha256.update(batch.serialize())
        return sha256.hexdigest(), len(self._rows)

    def chunks(self) -> Iterator[Chunk]:
        return _number_rows(self._name, self._iter_batches())

    def _iter_batches(self) -> Iterator[tuple[list[Row], pa.RecordBatch]]:
        has_json = "Json(" in repr(self._rows.features)  # columns of mixed types, as texts
        for part in self._load_parts():
            if has_json:
                rows = (remove_null_fields(row, self._rows.features) for row in part.to_list())
                yield from _iter_json_chunks((row, json.dumps(row)) for row in rows)
            else:
                for batch in part.with_format("arrow")[:].to_batches():
                    yield from _split_batch(self._name, batch)

    def _load_parts(self) -> Iterator[Any]:
        for start in range(0, len(self._rows), _CHUNK_ROWS):
            yield self._rows.select(range(start, min(len(self._rows), start + _CHUNK_ROWS)))


def _number_rows(name: str, batches: Iterator[tuple[list[Row], pa.RecordBatch]]) -> Iterator[Chunk]:
    first = 0
    for rows, stored in batches:
        yield Chunk(first, rows, stored)
        first += len(rows)
    if not first:
        raise DataError(f"{name}: the file has no rows")


def _read_parquet(name: str, path: Path) -> Iterator[tuple[list[Row], pa.RecordBatch]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK_ROWS):
            yield from _split_batch(name, batch)


def _split_batch(name: str, batch: pa.RecordBatch) -> Iterator[tuple[list[Row], pa.RecordBatch]]:
    """Split a batch of large rows. An Arrow file has one dictionary per column: dictionaries are decoded, because
    batches have different ones."""
    if reserved := sorted({*batch.schema.names} & {*OWN_COLUMNS}):
        raise DataError(f"{name}: the column name {reserved[0]!r} is reserved for tokenized rows; rename it")
    types = [(field.name, t.value_type if pa.types.is_dictionary(t := field.type) else t) for field in batch.schema]
    batch = batch.cast(pa.schema(types))
    num_rows = max(1, int(batch.num_rows * _CHUNK_BYTES / max(_CHUNK_BYTES, batch.nbytes)))
    for start in range(0, batch.num_rows, num_rows):
        piece = batch.slice(start, num_rows)
        yield _remove_null_fields(piece), piece


def _remove_null_fields(batch: pa.RecordBatch) -> list[Row]:
    return [cast("Row", remove_null_fields(row)) for row in batch.to_pylist()]


def _read_json(name: str, path: Path) -> Iterator[tuple[list[Row], pa.RecordBatch]]:
    """Read a JSON list, or one JSON object per line, unchanged: columns are not converted to one type."""
    with open(path, encoding="utf-8") as file:
        while (first := file.read(1)).isspace():
            pass
        file.seek(0)
        if first == "[":
            yield from _iter_json_chunks((row, json.dumps(row)) for row in iter_list_items(file))
        else:
            lines = ((line, number) for number, line in enumerate(file, start=1) if line.strip())
            yield from _iter_json_chunks((_parse_line(line, number), line) for line, number in lines)


def _iter_json_chunks(rows: Iterable[tuple[object, str]]) -> Iterator[tuple[list[Row], pa.RecordBatch]]:
    """Yield rows with their JSON texts in chunks."""
    piece: list[Row] = []
    texts: list[str] = []
    size = 0
    for number, (row, text) in enumerate(rows):
        piece.append(_check_object(row, number))
        texts.append(text)
        size += len(text)
        if len(piece) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield piece, _build_json_batch(texts)
            piece, texts, size = [], [], 0
    if piece:
        yield piece, _build_json_batch(texts)


def _build_json_batch(texts: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(texts, pa.large_string())], [_JSON])


def _check_object(row: object, number: int) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"row {number} is a {type(row).__name__}, not an object")
    return row


def _parse_line(line: str, number: int) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
