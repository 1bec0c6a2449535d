"""Retrieval by words: BM25, scored and stored by bm25s."""

import re
import threading
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_gym.tools.retrieval.corpus import CorpusError, Document
from skyrl_gym.tools.retrieval.ranking import Hit, best
from skyrl_gym.tools.retrieval.settings import BM25Settings

if TYPE_CHECKING:
    import bm25s

_WORD = re.compile(r"[^\W_]+")


class Analyzer:
    """Normalization of words: lower case, stemmed, without stop words and accents."""

    def __init__(self, language: str) -> None:
        """Raises ValueError if nothing is known of the language."""
        import Stemmer
        from bm25s import stopwords

        self._stemmer = None
        self._stop_words: frozenset[str] = frozenset()
        if language == "none":
            return
        if language not in Stemmer.algorithms():
            raise ValueError(f"language must be none or one of {', '.join(Stemmer.algorithms())}; got {language!r}")
        self._stemmer = Stemmer.Stemmer(language)
        self._lock = threading.Lock()  # a stemmer keeps a cache
        name = "EN" if language == "english" else language.upper()
        self._stop_words = frozenset(getattr(stopwords, f"STOPWORDS_{name}", ()))

    def words(self, text: str) -> list[str]:
        words = [word for word in _WORD.findall(text.lower()) if word not in self._stop_words]
        if self._stemmer is not None:
            # For the whole list: the cache is shared by all threads that ask.
            with self._lock:
                words = self._stemmer.stemWords(words)
        return [word if word.isascii() else _remove_accents(word) for word in words]


def _remove_accents(word: str) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFKD", word) if not unicodedata.combining(letter))


class BM25Index:
    """Documents by the words that they share with a query. A document that shares none is not found."""

    batch_size = 16
    """Queries worth searching together. Each is searched by itself, so more would only make the first ones wait."""

    def __init__(self, model: "bm25s.BM25", analyzer: Analyzer) -> None:
        self._model = model
        self._analyzer = analyzer

    @classmethod
    def build(cls, documents: Iterable[Document], settings: BM25Settings) -> "BM25Index":
        """Raises CorpusError if no document has a word."""
        import bm25s

        analyzer = Analyzer(settings.language)
        vocabulary: dict[str, int] = {}
        token_ids = []
        for document in documents:
            words = analyzer.words(document["title"]) * settings.title_weight + analyzer.words(document["text"])
            # Four bytes a word: as lists of text, the words of a large corpus would not fit into memory.
            token_ids.append(array("i", (vocabulary.setdefault(word, len(vocabulary)) for word in words)))
        if not vocabulary:
            raise CorpusError("no document has a word to search for")
        model = bm25s.BM25(method="lucene", k1=settings.k1, b=settings.b)
        model.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
        return cls(model, analyzer)

    def save(self, folder: Path) -> None:
        self._model.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path, settings: BM25Settings) -> "BM25Index":
        """Load an index. The scores stay on disk, and processes on one machine share the pages that they read."""
        import bm25s

        return cls(bm25s.BM25.load(folder, mmap=True), Analyzer(settings.language))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most `topk` documents, the best first; of equal ones the first of the corpus."""
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        token_ids = self._model.get_tokens_ids(self._analyzer.words(query))
        # Without a known word all scores are 0: no document answers the query.
        return best(self._model.get_scores_from_ids(token_ids), topk) if token_ids else []
