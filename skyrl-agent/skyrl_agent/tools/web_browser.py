"""Web reading tool: address -> page -> text -> the part that the goal needs."""

import asyncio
import os
import sqlite3
import time

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import BaseTool, ToolContext
from skyrl_agent.tools.cache import get_shared_cache
from skyrl_agent.tools.settings import get_setting_list, setting
from skyrl_agent.tools.web.blocklist import Blocklist
from skyrl_agent.tools.web.readers import DirectReader, JinaReader, PageError, PageReader, PageRefused, WebPage
from skyrl_agent.tools.web.summary import ChatSummarizer, OwnSummarizer, Summarizer, summarize_page
from skyrl_agent.tools.web.urls import list_url_variants, parse_urls
from skyrl_gym.concurrency import gather_or_cancel

MAX_URLS = 5
"""Maximum number of URLs per call."""
FORGET_FAILURE_SECONDS = 10.0
BLOCKED = "This page is blocked: do without it."


class WebBrowser(BaseTool):
    """
    Args:
        reader: `direct` (we fetch pages), `jina` (a reader service, key in JINA_API_KEYS), or an object with `read`.
        reader_url: of the reader service; none: the public one.
        timeout: seconds for one page.
        allow_private: `direct` also reads addresses of this machine and its network.
        summary_url, summary_model: an OpenAI-compatible server that summarizes pages; none: the environment variables
            WEB_SUMMARY_API_BASE and WEB_SUMMARY_MODEL; without them the agent's own model does.
        summary_key_env: environment variable with that server's key, where it needs one.
        page_chars, chunk_chars: so much of a page is read, and so much at a time.
        blocked_domains, blocked_keywords: none: WEB_BLOCKLIST_DOMAINS (else SEARCH_BLOCKLIST_DOMAINS), ..._KEYWORDS.
        cache_file: pages are kept there over runs; none: WEBPAGE_CACHE_FILE, else in memory.
        cache_pages: how many are kept.
    """

    name = "web_browser"

    def __init__(
        self,
        *,
        reader: str | PageReader = "direct",
        reader_url: str | None = None,
        timeout: float = 30.0,
        allow_private: bool = False,
        summary_url: str | None = None,
        summary_model: str | None = None,
        summary_key_env: str = "WEB_SUMMARY_API_KEY",
        page_chars: int = 240_000,
        chunk_chars: int = 16_000,
        blocked_domains: list[str] | None = None,
        blocked_keywords: list[str] | None = None,
        cache_file: str | None = None,
        cache_pages: int = 10_000,
    ) -> None:
        self.page_chars, self.chunk_chars = page_chars, chunk_chars
        try:
            self.reader = (
                _build_reader(reader, reader_url, timeout, allow_private) if isinstance(reader, str) else reader
            )
            self.summarizer = _build_summarizer(summary_url, summary_model, summary_key_env)
            self.cache = get_shared_cache(setting(cache_file, "WEBPAGE_CACHE_FILE"), cache_pages)
        except (ValueError, OSError, sqlite3.Error) as failure:
            raise ConfigError(f"tool {self.name}: {failure}") from failure
        self.blocked = Blocklist(
            get_setting_list(blocked_domains, "WEB_BLOCKLIST_DOMAINS", "SEARCH_BLOCKLIST_DOMAINS"),
            get_setting_list(blocked_keywords, "WEB_BLOCKLIST_KEYWORDS", "SEARCH_BLOCKLIST_KEYWORDS"),
        )
        self._failed: dict[str, tuple[float, str]] = {}

    async def run(self, context: ToolContext, url: list[str] | str, goal: str) -> str:
        """Reads web pages and returns what they hold for a goal.

        Args:
            url: The address of a page, or several, at most 5.
            goal: What to find out from them, in words.
        """
        urls = parse_urls(url)
        if not 1 <= len(urls) <= MAX_URLS:
            raise ValueError(f"give 1 to {MAX_URLS} addresses, such as https://example.org/page; got {len(urls)}")
        found = await gather_or_cancel([self._read_for_goal(context, address, goal) for address in urls])
        return "\n=======\n".join(f"{address}\n{text}" for address, text in zip(urls, found, strict=True))

    async def _read_for_goal(self, context: ToolContext, url: str, goal: str) -> str:
        if self.blocked.blocks(url):
            return BLOCKED
        try:
            text = (await self._read(url))[: self.page_chars].strip()
        except PageError as failure:
            return f"This page could not be read: {failure}"
        if not text:
            return "This page holds no text."
        summarizer = self.summarizer or (OwnSummarizer(context.ask) if context.ask else None)
        if summarizer is None:
            return text
        return await summarize_page(summarizer, text, goal, context.trajectory_id, self.chunk_chars)

    async def _read(self, url: str) -> str:
        """Return the page's text, cached if possible. Raises PageError."""
        text = await asyncio.to_thread(self.cache.get, url)
        if text is not None:
            return text
        when, why = self._failed.get(url, (0.0, ""))
        if why and time.monotonic() - when < FORGET_FAILURE_SECONDS:
            raise PageError(why)
        try:
            page = await self._read_by_first(url)
        except PageError as failure:
            self._failed[url] = (time.monotonic(), str(failure))
            raise
        if self.blocked.blocks(page.url):  # a redirect led to a blocked page
            raise PageError(BLOCKED)
        await asyncio.to_thread(self.cache.put, url, page.text[: self.page_chars])
        return page.text

    async def _read_by_first(self, url: str) -> WebPage:
        """Read a page by the first reader that succeeds. Raises the PageError of the original URL."""
        first: PageError | None = None
        for address in list_url_variants(url):
            try:
                return await self.reader.read(address)
            except PageRefused:
                raise
            except PageError as failure:
                first = first or failure
        assert first is not None
        raise first

    async def close(self) -> None:
        await self.reader.close()
        if self.summarizer is not None:
            await self.summarizer.close()


def _build_reader(kind: str, url: str | None, timeout: float, allow_private: bool) -> PageReader:
    """Raises ValueError."""
    if kind == "direct":
        return DirectReader(timeout, allow_private=allow_private)
    if kind == "jina":
        keys = tuple(get_setting_list(None, "JINA_API_KEYS", "JINA_API_KEY"))
        return JinaReader(keys, timeout=timeout, **({"url": url} if url else {}))
    raise ValueError(f"reader must be direct or jina; got {kind!r}")


def _build_summarizer(url: str | None, model: str | None, key_env: str) -> Summarizer | None:
    """Raises ValueError."""
    base_url, model = setting(url, "WEB_SUMMARY_API_BASE"), setting(model, "WEB_SUMMARY_MODEL")
    if base_url is None:
        return None
    if model is None:
        raise ValueError("summary_url also needs summary_model or the environment variable WEB_SUMMARY_MODEL")
    return ChatSummarizer(base_url, model, os.environ.get(key_env))
