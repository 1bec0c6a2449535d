"""Settings of a retrieval server. Imports nothing heavy."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

IndexKind = Literal["bm25", "dense"]

DEFAULT_MODEL = "intfloat/e5-base-v2"


@dataclass(frozen=True, kw_only=True)
class BM25Settings:
    """Words count by rarity, saturate with repetition, and count less in long documents (Robertson and Zaragoza,
    "The Probabilistic Relevance Framework: BM25 and Beyond", 2009). Defaults are those of Lucene."""

    k1: float = 1.2
    """How slowly a repeated word saturates."""
    b: float = 0.75
    """How much the length of a document counts, 0 to 1."""
    language: str = "english"
    """Whose words are stemmed, and whose stop words are left out; "none" for neither."""
    title_weight: int = 2
    """How often the words of a title count."""


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    """Vectors of a sentence-transformers model, compared by the cosine of their angle."""

    model: str = DEFAULT_MODEL
    """Name or folder."""
    query_prefix: str | None = None
    """Before each query. None: "query: " for models named e5, else the model's own prompt, if it has one."""
    passage_prefix: str | None = None
    """Before each document. None: "passage: " for models named e5, else the model's own prompt, if it has one."""
    factory: str = "Flat"
    """What faiss builds, in the words of its index factory: "Flat" is exact, "HNSW32" faster and approximate."""
    batch_size: int = 64
    """Texts that the model reads at a time."""
    device: str | None = None
    """Where the model runs, as torch names it. None: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings:
    """A retrieval server."""

    corpus: Path | None = None
    """A .jsonl, .jsonl.gz or .parquet file. None: the one that the index was made from."""
    index: IndexKind = "bm25"
    index_path: Path | None = None
    """Folder of the index, made if there is none; or the file of a faiss index that was made elsewhere from the same
    corpus. None: beside the corpus."""
    rebuild: bool = False
    """Make the index anew if it is there."""
    bm25: BM25Settings = BM25Settings()
    dense: DenseSettings = DenseSettings()
    topk: int = 3
    """Documents for each query that does not ask for a number."""
    max_topk: int = 100
    max_queries: int = 512
    """In one request."""
    max_query_characters: int = 8192
    max_body_bytes: int = 4 << 20

    def folder(self) -> Path:
        """Return the folder of the index. Raises ValueError if neither a corpus nor an index is named."""
        if self.index_path is not None:
            return self.index_path
        if self.corpus is None:
            raise ValueError("a corpus is needed, or the path of an index that was made from one")
        return self.corpus.with_name(f"{self.corpus.name}.{self.index}-index")

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "RetrievalSettings":
        """Parse the output of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        for name in ("corpus", "index_path"):
            values[name] = None if values[name] is None else Path(values[name])
        values |= {"bm25": BM25Settings(**values["bm25"]), "dense": DenseSettings(**values["dense"])}
        return RetrievalSettings(**values)
