"""Search engines of the web."""

from typing import Any

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import BaseTool, ToolContext
from skyrl_agent.tools.search_clients import SERPER_URL, YOUCOM_URL, Hit, SearchClient, SerperClient, YoucomClient
from skyrl_agent.tools.settings import get_setting_list, required
from skyrl_agent.tools.web.blocklist import Blocklist
from skyrl_gym.concurrency import gather_or_cancel
from skyrl_gym.tools.signature import parse_text

MAX_QUERIES = 5
"""Maximum number of queries per call."""


class SearchEngine(BaseTool):
    """Google search through serper.dev. For another engine, define a subclass with `make_client` and register it under
    another name.

    Args:
        api_key: None: the environment variable of the engine (GOOGLE_SEARCH_KEY).
        url: address of the engine.
        num: results per query.
        timeout: seconds per request.
        blocked_domains, blocked_keywords: results that match are dropped; None: the environment variables
            SEARCH_BLOCKLIST_DOMAINS and SEARCH_BLOCKLIST_KEYWORDS, comma-separated.
        negative_filters: also send the blocked domains to the engine (`-site:`).
        client: replaces the engine's client.
    """

    name = "search_engine"
    variable = "GOOGLE_SEARCH_KEY"
    default_url = SERPER_URL

    def __init__(
        self,
        *,
        api_key: str | None = None,
        url: str | None = None,
        num: int = 10,
        timeout: float = 10.0,
        blocked_domains: list[str] | None = None,
        blocked_keywords: list[str] | None = None,
        negative_filters: bool = True,
        client: SearchClient | None = None,
    ) -> None:
        self.num = num
        self.blocked = Blocklist(
            get_setting_list(blocked_domains, "SEARCH_BLOCKLIST_DOMAINS"),
            get_setting_list(blocked_keywords, "SEARCH_BLOCKLIST_KEYWORDS"),
        )
        self.suffix = "".join(f" -site:{domain}" for domain in self.blocked.domains) if negative_filters else ""
        if client is None:
            key = required(self.name, "api_key", api_key, self.variable)
            try:
                client = self.make_client(key, url or self.default_url, timeout)
            except ValueError as failure:
                raise ConfigError(f"tool {self.name}: {failure}") from failure
        self.client = client

    def make_client(self, api_key: str, url: str, timeout: float) -> SearchClient:
        return SerperClient(api_key, url, timeout)

    async def run(self, context: ToolContext, query: list[str] | str) -> str:
        """Searches the web and returns titles, addresses and excerpts.

        Args:
            query: One query or several, at most 5.
        """
        queries = parse_queries(query)
        found = await gather_or_cancel([self.client.search(text + self.suffix, self.num) for text in queries])
        return "\n=======\n".join(map(self._format_hits, queries, found))

    def _format_hits(self, query: str, hits: list[Hit]) -> str:
        hits = [hit for hit in hits if not self.blocked.blocks(hit.url, f"{hit.title} {hit.text}")]
        if not hits:
            return f"No results for '{query}'. Try other or fewer words."
        lines = (f"{number}. [{hit.title}]({hit.url})\n{hit.text}" for number, hit in enumerate(hits, 1))
        return f"Results for '{query}':\n\n" + "\n\n".join(lines)

    async def close(self) -> None:
        await self.client.close()


class YoucomSearchEngine(SearchEngine):
    """You.com. The key's environment variable is YDC_API_KEY."""

    name = "youcom_search_engine"
    variable = "YDC_API_KEY"
    default_url = YOUCOM_URL

    def make_client(self, api_key: str, url: str, timeout: float) -> SearchClient:
        return YoucomClient(api_key, url, timeout)


def parse_queries(query: list[str] | str) -> list[str]:
    """Normalize queries: strip whitespace and remove duplicates. A text may contain a JSON list.

    Raises:
        ValueError: no queries, or too many.
    """
    parsed: Any = parse_text(query) if isinstance(query, str) else query
    texts = parsed if isinstance(parsed, list) else [query]
    queries = list(dict.fromkeys(text for item in texts if (text := " ".join(str(item).split()))))
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise ValueError(f"give 1 to {MAX_QUERIES} queries; got {len(queries)}")
    return queries
