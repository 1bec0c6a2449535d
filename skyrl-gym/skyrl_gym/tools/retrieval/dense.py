"""Retrieval by meaning: vectors of a sentence-transformers model, searched by faiss."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyrl_gym.tools.retrieval.corpus import Document
from skyrl_gym.tools.retrieval.ranking import Hit
from skyrl_gym.tools.retrieval.settings import DenseSettings

if TYPE_CHECKING:
    import numpy as np

VECTORS_FILE = "vectors.faiss"
_CHUNK = 4096
_TRAINING_DOCUMENTS = 100_000
"""Maximum number of documents that a trainable index is trained on; more bring little."""


class Encoder:
    """Texts to vectors of length 1, so that their inner product is the cosine."""

    def __init__(self, settings: DenseSettings) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(settings.model, device=settings.device)
        self._batch_size = settings.batch_size
        named_e5 = "e5" in Path(settings.model).name.lower()
        self._query_prefix = _get_or_default(settings.query_prefix, "query: " if named_e5 else None)
        self._passage_prefix = _get_or_default(settings.passage_prefix, "passage: " if named_e5 else None)

    def queries(self, texts: Sequence[str]) -> "np.ndarray":
        """[N, D], float32"""
        return self._vectors(texts, "query", self._query_prefix)

    def passages(self, texts: Sequence[str]) -> "np.ndarray":
        """[N, D], float32"""
        return self._vectors(texts, "document", self._passage_prefix)

    def _vectors(self, texts: Sequence[str], task: Literal["query", "document"], prefix: str | None) -> "np.ndarray":
        import numpy as np

        encode = self._model.encode_query if task == "query" else self._model.encode_document
        vectors = encode(
            list(texts),
            prompt=prefix,
            batch_size=self._batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
            convert_to_numpy=True,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


class DenseIndex:
    """Index that ranks documents by the cosine similarity of their vectors and the query's."""

    def __init__(self, vectors: Any, encoder: Encoder, batch_size: int) -> None:
        """`vectors` is a faiss index of inner products, one vector for each document, in the order of the corpus."""
        self._vectors = vectors
        self._encoder = encoder
        self.batch_size = batch_size
        """Queries worth searching together: the model reads them all at once."""

    def __len__(self) -> int:
        return self._vectors.ntotal

    @classmethod
    def build(cls, documents: Iterable[Document], settings: DenseSettings) -> "DenseIndex":
        import faiss

        encoder = Encoder(settings)
        texts = (document["contents"] for document in documents)
        first = list(itertools.islice(texts, _CHUNK))
        first_vectors = encoder.passages(first)
        vectors = faiss.index_factory(first_vectors.shape[1], settings.factory, faiss.METRIC_INNER_PRODUCT)
        if not vectors.is_trained:
            more = list(itertools.islice(texts, _TRAINING_DOCUMENTS - len(first)))
            first_vectors = _concatenate(first_vectors, encoder.passages(more)) if more else first_vectors
            vectors.train(first_vectors)
        vectors.add(first_vectors)
        while chunk := list(itertools.islice(texts, _CHUNK)):
            vectors.add(encoder.passages(chunk))
        return cls(vectors, encoder, settings.batch_size)

    def save(self, folder: Path) -> None:
        import faiss

        faiss.write_index(self._vectors, str(folder / VECTORS_FILE))

    @classmethod
    def load(cls, path: Path, settings: DenseSettings) -> "DenseIndex":
        """Load an index from a folder, or from a faiss file that was made elsewhere. The vectors stay on disk."""
        import faiss

        file = path / VECTORS_FILE if path.is_dir() else path
        vectors = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
        return cls(vectors, Encoder(settings), settings.batch_size)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most `topk` documents, the best first."""
        scores_N_K, numbers_N_K = self._vectors.search(self._encoder.queries(queries), min(topk, len(self)))
        return [
            [(int(number), float(score)) for number, score in zip(numbers, scores, strict=True) if number >= 0]
            for numbers, scores in zip(numbers_N_K, scores_N_K, strict=True)
        ]


def _concatenate(*parts: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.concatenate(parts)


def _get_or_default(given: str | None, default: str | None) -> str | None:
    return default if given is None else given
