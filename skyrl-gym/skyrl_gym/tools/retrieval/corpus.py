"""Corpus of documents, read from a file.

A document is a dict with `id`, `title`, `text` and `contents`, and all other fields of its row. `contents` is indexed
and shown: a first line with the title in quotation marks, then the text.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_gym.valid_unicode import replace_lone_surrogates

Document = dict[str, Any]

_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 1024


class CorpusError(ValueError):
    """A corpus has no documents, or an invalid row. The text names the file, the row and the rule."""


def read_corpus(path: str | Path) -> Iterator[Document]:
    """Iterate over the documents of a `.jsonl`, `.jsonl.gz` or `.parquet` file.

    Raises:
        CorpusError: the file has another suffix, or a row is not a document.
        FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        rows = _read_parquet_rows(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = _read_json_rows(path)
    else:
        raise CorpusError(f"a corpus is a .jsonl, .jsonl.gz or .parquet file; got {path}")
    return to_documents(rows, str(path))


def to_documents(rows: Iterable[Mapping[str, object] | str], source: str = "documents") -> Iterator[Document]:
    """Documents from rows as a corpus has them; a row may also be a bare text. Rows without an id get their number.

    Raises:
        CorpusError: a row has neither `text` nor `contents`, or they are not text.
    """
    for number, row in enumerate(rows):
        yield _make_document(row, number, f"{source}, row {number + 1}")


def _make_document(row: object, number: int, where: str) -> Document:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: a document must be an object with `text` or `contents`; got {row!r:.100}")
    title, text, contents = (row.get(name) for name in ("title", "text", "contents"))
    for name, value in (("title", title), ("text", text), ("contents", contents)):
        if value is not None and not isinstance(value, str):
            raise CorpusError(f"{where}: {name} must be text; got {value!r:.100}")
    title, text, contents = (_encodable(value) for value in (title, text, contents))
    if contents is not None and text is None:
        title, text = _split(contents, title)
    if text is None:
        raise CorpusError(f"{where}: a document needs `text` or `contents`; the row has {', '.join(row) or 'nothing'}")
    title = title or ""
    contents = contents if contents is not None else f'"{title}"\n{text}' if title else text
    identity = row.get("id")
    identity = str(number if identity is None else identity)
    return {**row, "id": identity, "title": title, "text": text, "contents": contents}


def _encodable(text: str | None) -> str | None:
    return None if text is None else replace_lone_surrogates(text)


def _split(contents: str, title: str | None) -> tuple[str, str]:
    """Split contents with a first line in quotation marks. Returns title and text."""
    first, _, rest = contents.partition("\n")
    if title is None and len(first) > 2 and first.startswith('"') and first.endswith('"'):
        return first[1:-1], rest
    return title or "", contents


def _read_json_rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as failure:
                raise CorpusError(f"{path}, line {number}: not JSON: {failure}") from failure


def _read_parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            yield from batch.to_pylist()


def digest_of(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
