"""Settings of a retrieval server. Imports nothing heavy."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

IndexKind = Literal["bm25", "dense"]

DEFAULT_MODEL = "intfloat/e5-base-v2"


@dataclass(frozen=True, kw_only=True)
class BM25Settings:
    """BM25 ranking: words are weighted by rarity, saturate with repetition, and weigh less in long documents (Robertson
    and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009). Defaults as in Lucene.
    """

    k1: float = 1.2
    """Saturation of repeated words; larger values saturate more slowly."""
    b: float = 0.75
    """Weight of document length, from 0 to 1."""
    language: str = "english"
    """Language of stemming and stop words; "none" for neither."""
    title_weight: int = 2
    """Number of times that the words of a title count."""


@dataclass(frozen=True, kw_only=True)
class DenseSettings:
    """Embeddings of a sentence-transformers model, compared by cosine similarity."""

    model: str = DEFAULT_MODEL
    """Name on the Hugging Face hub, or folder."""
    query_prefix: str | None = None
    """Prefix of each query. None: "query: " for models named e5, else the model's own prompt, if it has one."""
    passage_prefix: str | None = None
    """Prefix of each document. None: "passage: " for models named e5, else the model's own prompt, if it has one."""
    factory: str = "Flat"
    """Description of the index in the language of faiss's index factory: "Flat" is exact, "HNSW32" faster and
    approximate."""
    batch_size: int = 64
    """Number of texts that the model encodes at a time."""
    device: str | None = None
    """Device of the model, as torch names it. None: a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings:
    """Settings of a retrieval server."""

    corpus: Path | None = None
    """Corpus file: .jsonl, .jsonl.gz or .parquet. None: the one that the index was built from."""
    index: IndexKind = "bm25"
    index_path: Path | None = None
    """Folder of the index, which is built if there is none; or a faiss index file built elsewhere from the same corpus.
    None: next to the corpus."""
    rebuild: bool = False
    """Rebuild an existing index."""
    bm25: BM25Settings = BM25Settings()
    dense: DenseSettings = DenseSettings()
    topk: int = 3
    """Documents per query, for requests that do not set it."""
    max_topk: int = 100
    max_queries: int = 512
    """Maximum number of queries per request."""
    max_query_characters: int = 8192
    max_body_bytes: int = 4 << 20

    def folder(self) -> Path:
        """Return the folder of the index. Raises ValueError if neither a corpus nor an index is named."""
        if self.index_path is not None:
            return self.index_path
        if self.corpus is None:
            raise ValueError("a corpus or the path of an existing index is required")
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
