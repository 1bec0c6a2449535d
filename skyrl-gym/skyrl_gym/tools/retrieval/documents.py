"""Documents by number. Large corpora stay on disk."""

import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from skyrl_gym.tools.retrieval.corpus import Document

_DOCUMENTS = "documents.jsonl"
_OFFSETS = "offsets.npy"


class Documents(Protocol):
    """A sequence of documents, in memory or not."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Document: ...

    def __iter__(self) -> Iterator[Document]: ...


class DocumentFile(Sequence[Document]):
    """Documents in a file, one per line, read through a memory map, so unused documents take no memory."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
        with (folder / _DOCUMENTS).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, documents: Iterable[Document]) -> "DocumentFile":
        """Write documents into a folder. Raises ValueError for an empty list, since an empty file cannot be mapped."""
        import numpy as np

        offsets = [0]
        with (folder / _DOCUMENTS).open("wb") as file:
            for document in documents:
                offsets.append(offsets[-1] + file.write(json.dumps(document, default=str).encode() + b"\n"))
        if len(offsets) == 1:
            raise ValueError("the corpus has no documents")
        np.save(folder / _OFFSETS, np.asarray(offsets, dtype=np.int64))
        return DocumentFile(folder)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Document:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        return json.loads(self._lines[int(self._offsets[number]) : int(self._offsets[number + 1])])
