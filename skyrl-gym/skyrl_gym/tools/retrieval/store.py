"""An index on disk: made once, whole or not at all, and known by what it was made from."""

import contextlib
import fcntl
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from skyrl_gym.tools.retrieval.corpus import CorpusError, Document, digest_of, read_corpus, to_documents
from skyrl_gym.tools.retrieval.documents import DocumentFile, Documents
from skyrl_gym.tools.retrieval.ranking import Index
from skyrl_gym.tools.retrieval.settings import BM25Settings, RetrievalSettings
from skyrl_gym.waits import waiting
from skyrl_gym.whole_folders import replacing

MANIFEST = "manifest.json"
_FORMAT = 1

_NOT_IN_THE_INDEX = {"query_prefix", "batch_size", "device"}
"""Settings of the dense index that may change from start to start."""


class IndexMismatchError(ValueError):
    """The folder holds an index of something else, or no index. The text says what, and what to do."""


class Retriever:
    """An index and the documents that it is of."""

    def __init__(self, kind: str, index: Index, documents: Documents) -> None:
        self.kind = kind
        self.index = index
        self.documents = documents

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, object] | str], settings: BM25Settings | None = None) -> "Retriever":
        """BM25 over a handful of documents, in memory. Raises CorpusError."""
        from skyrl_gym.tools.retrieval.bm25 import BM25Index

        found = list(to_documents(documents))
        return cls("bm25", BM25Index.build(found, settings or BM25Settings()), found)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[Document, float]]]:
        """Return for each query at most `topk` documents with their scores, the best first."""
        return [
            [(self.documents[number], score) for number, score in hits] for hits in self.index.search(queries, topk)
        ]


def build_index(settings: RetrievalSettings) -> Path:
    """Build the index of the settings if it does not exist. Among concurrent processes, one builds it.

    Returns its folder.

    Raises:
        IndexMismatchError: the folder has an index of another corpus or with other settings (and `rebuild` is not set),
            or other files.
        CorpusError: the corpus has no documents, or an invalid row.
        FileNotFoundError: the corpus does not exist.
    """
    folder = settings.folder()
    if _is_external_index(settings):
        made_of = {"kind": "documents"}
        folder = folder.with_name(f"{folder.name}.documents")
    else:
        made_of = {"kind": settings.index, **_read_index_settings(settings)}
    if settings.corpus is None and not (folder / MANIFEST).is_file():
        raise IndexMismatchError(f"{folder} has no index, and no corpus is given to build it from")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder):
        found = _read_manifest(folder)
        if found is not None and not settings.rebuild:
            _check(folder, found, made_of, settings.corpus)
        elif settings.corpus is None:
            raise IndexMismatchError(f"{folder} cannot be rebuilt without a corpus")
        else:
            # Other processes that have the old index open keep reading it: its files live until they are closed.
            with replacing(folder) as place:
                _build(place, settings.corpus, made_of, settings)
    return folder


def open_retriever(settings: RetrievalSettings) -> Retriever:
    """Load the retriever that the settings describe; build its index if it is absent. Raises as `build_index` does."""
    folder = build_index(settings)
    documents = DocumentFile(folder)
    if settings.index == "bm25":
        from skyrl_gym.tools.retrieval.bm25 import BM25Index

        return Retriever("bm25", BM25Index.load(folder, settings.bm25), documents)

    from skyrl_gym.tools.retrieval.dense import DenseIndex

    index = DenseIndex.load(settings.folder(), settings.dense)
    if len(index) != len(documents):
        raise IndexMismatchError(
            f"{settings.folder()} has {len(index)} vectors, the corpus {len(documents)} documents: it was "
            "built from another corpus"
        )
    return Retriever("dense", index, documents)


def _is_external_index(settings: RetrievalSettings) -> bool:
    """Return whether the path is a faiss index that was made elsewhere. Then only the documents are stored here."""
    return settings.index == "dense" and settings.folder().is_file()


def _read_index_settings(settings: RetrievalSettings) -> dict[str, object]:
    chosen = asdict(settings.bm25 if settings.index == "bm25" else settings.dense)
    return {name: value for name, value in chosen.items() if name not in _NOT_IN_THE_INDEX}


def _build(folder: Path, corpus: Path, made_of: Mapping[str, object], settings: RetrievalSettings) -> None:
    try:
        documents = DocumentFile.write(folder, _show_progress(read_corpus(corpus), "reading documents"))
    except CorpusError:
        raise
    except (ValueError, EOFError, gzip.BadGzipFile) as failure:
        raise CorpusError(f"{corpus}: {failure}") from failure
    if made_of["kind"] == "bm25":
        from skyrl_gym.tools.retrieval.bm25 import BM25Index

        BM25Index.build(_show_progress(documents, "indexing", len(documents)), settings.bm25).save(folder)
    elif made_of["kind"] == "dense":
        from skyrl_gym.tools.retrieval.dense import DenseIndex

        DenseIndex.build(_show_progress(documents, "encoding", len(documents)), settings.dense).save(folder)
    manifest = {
        "format": _FORMAT,
        "made_of": made_of,
        "documents": len(documents),
        "corpus": {"path": str(corpus), "sha256": digest_of(corpus), **asdict(_Stamp.of(corpus))},
    }
    # Written last: a folder with a manifest is complete.
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _show_progress(documents: Iterable[Document], what: str, total: int | None = None) -> Iterator[Document]:
    """Iterate with a progress bar, on a terminal only."""
    return tqdm(documents, desc=what, total=total, unit=" documents", disable=None)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Stamp:
    """Size and time of a file, which tell without reading it that it is unchanged."""

    bytes: int
    modified_ns: int

    @staticmethod
    def of(path: Path) -> "_Stamp":
        status = path.stat()
        return _Stamp(bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _check(folder: Path, found: dict[str, Any], made_of: Mapping[str, object], corpus: Path | None) -> None:
    advice = "use another index_path, or rebuild it (--rebuild)"
    if found.get("format") != _FORMAT:
        raise IndexMismatchError(f"{folder} has format {found.get('format')}, expected {_FORMAT}: {advice}")
    differing = [
        f"{name} {found['made_of'].get(name)!r}, not {value!r}"
        for name, value in made_of.items()
        if found["made_of"].get(name) != value
    ]
    if differing:
        raise IndexMismatchError(f"the index at {folder} was built with {'; '.join(differing)}: {advice}")
    if corpus is None:
        return
    known = found["corpus"]
    stamp = _Stamp(bytes=known["bytes"], modified_ns=known["modified_ns"])
    if _Stamp.of(corpus) != stamp and digest_of(corpus) != known["sha256"]:
        raise IndexMismatchError(
            f"the index at {folder} was built from another corpus ({known['path']}, {known['bytes']} bytes) than the "
            f"current {corpus}: {advice}"
        )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a finished index, or return None.

    Raises:
        IndexMismatchError: the folder has files that are not an index.
    """
    file = folder / MANIFEST
    if file.is_file():
        manifest = json.loads(file.read_text())
        if isinstance(manifest, dict) and "made_of" in manifest:
            return manifest
        raise IndexMismatchError(f"{file} is not the manifest of an index")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise IndexMismatchError(f"{folder} is not an index and not empty: use another index_path")
    return None


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time. The kernel releases the lock when its process exits."""
    try:
        # A file next to the folder, because the folder itself is renamed.
        file = folder.with_name(f".{folder.name}.lock").open("w")
    except PermissionError:
        if not (folder / MANIFEST).is_file():
            raise
        yield  # a finished index on a read-only disk
        return
    with file:
        with waiting("a lock", on=f"lock {file.name}"):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
