"""Search in a custom corpus through a retrieval server (`python -m skyrl_gym.tools.retrieval`)."""

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import BaseTool, ToolContext
from skyrl_agent.tools.search_clients import RetrieverClient, SearchClient
from skyrl_agent.tools.settings import required, setting


class LocalSearch(BaseTool):
    """
    Args:
        url: address of the server; None: the environment variable LOCAL_SEARCH_URL.
        topk: documents per query; None: LOCAL_SEARCH_TOP_K, else 3.
        timeout: seconds per request.
        max_document_chars: length limit of a document; longer ones are truncated.
        client: replaces the server's client.
    """

    name = "local_search"
    variables: tuple[str, ...] = ("LOCAL_SEARCH_URL",)
    default_topk = 3
    default_document_chars: int | None = None

    def __init__(
        self,
        *,
        url: str | None = None,
        topk: int | None = None,
        timeout: float = 30.0,
        max_document_chars: int | None = None,
        client: SearchClient | None = None,
    ) -> None:
        given = topk or setting(None, "LOCAL_SEARCH_TOP_K", "LOCAL_SEARCH_TOPK") or self.default_topk
        try:
            self.topk = int(given)
            self.client = client or RetrieverClient(required(self.name, "url", url, *self.variables), timeout)
        except ConfigError:
            raise
        except ValueError as failure:
            raise ConfigError(f"tool {self.name}: {failure}") from failure
        self.max_document_chars = max_document_chars or self.default_document_chars

    async def run(self, context: ToolContext, query: str) -> str:
        """Searches a collection of documents and returns those that fit best, numbered.

        Args:
            query: What to look for, in words.
        """
        if not query.strip():
            raise ValueError("the query is empty: say what to look for")
        hits = await self.client.search(query.strip(), self.topk)
        return (
            "\n".join(
                f"Doc {number}(Title: {hit.title}) {hit.text[: self.max_document_chars]}"
                for number, hit in enumerate(hits, 1)
            )
            or "No document was found. Try other words."
        )

    async def close(self) -> None:
        await self.client.close()


class FaissSearch(LocalSearch):
    """Search by meaning: the same over a server of vectors, `python -m skyrl_gym.tools.retrieval --index dense`."""

    name = "faiss_search"
    variables = ("FAISS_SEARCH_URL", "LOCAL_SEARCH_URL")
    default_topk = 5
    default_document_chars = 2000
