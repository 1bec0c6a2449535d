"""A retrieval server for the `search` environment: `python -m skyrl_gym.tools.retrieval --corpus FILE`.

From code, `RetrievalServer(documents)` is one in this process. Needs the `retrieval` extra; dense vectors need `dense`.
"""

from skyrl_gym.tools.retrieval.corpus import CorpusError, read_corpus
from skyrl_gym.tools.retrieval.server import RetrievalServer
from skyrl_gym.tools.retrieval.settings import RetrievalSettings
from skyrl_gym.tools.retrieval.store import IndexMismatchError, Retriever, build_index, open_retriever

__all__ = [
    "CorpusError",
    "IndexMismatchError",
    "RetrievalServer",
    "RetrievalSettings",
    "Retriever",
    "build_index",
    "open_retriever",
    "read_corpus",
]
