"""Pages to text: by ourselves, or through a reader service. A reader is a class with one method, `read`."""

import asyncio
import codecs
import random
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from skyrl_agent.errors import InfraError
from skyrl_agent.tools.web.html_text import html_to_text
from skyrl_agent.tools.web.public_addresses import PrivateAddress, PublicTransport
from skyrl_gym.services import TRANSIENT_STATUSES, AsyncService, Retries, certificates

JINA_URL = "https://r.jina.ai"
USER_AGENT = "Mozilla/5.0 (compatible; skyrl-agent)"
_HTML = ("text/html", "application/xhtml+xml")
_PLAIN = (
    "text/",
    "application/json",
    "application/xml",
    "application/ld+json",
    "application/atom+xml",
    "application/rss+xml",
)

_FAULTS_OF_THE_PAGE = frozenset({408, 504, 524})
"""A reader service says so of a page that did not answer it."""


class PageError(ValueError):
    """A page cannot be read. The text is for the model."""


class PageRefused(PageError):
    """Refusal of a page, which must not be read under another form of its address either."""


@dataclass(frozen=True)
class WebPage:
    """Text of a page and its final address."""

    url: str
    """Final URL of the page, after redirects."""
    text: str


class PageReader(Protocol):
    """Interface of page readers."""

    async def read(self, url: str) -> WebPage:
        """
        Raises:
            PageError: the page is missing, is not text, or its server does not reply.
            InfraError: the reader itself does not work.
        """
        ...

    async def close(self) -> None: ...


class DirectReader:
    """Reader that fetches pages directly. Scripts are not run.

    Args:
        timeout: seconds from connecting to the last byte.
        max_bytes: size limit of a page; the rest is not read.
        allow_private: also allow private addresses (this machine and its network).
    """

    def __init__(self, timeout: float = 20.0, max_bytes: int = 4 << 20, allow_private: bool = False) -> None:
        self.timeout, self.max_bytes = timeout, max_bytes
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=certificates()) if allow_private else PublicTransport(),
            follow_redirects=True,
            max_redirects=8,
            timeout=None,
            headers={"User-Agent": USER_AGENT, "Accept": "text/html,text/plain;q=0.9,*/*;q=0.5"},
        )

    async def read(self, url: str) -> WebPage:
        try:
            async with asyncio.timeout(self.timeout), self._client.stream("GET", url) as answer:
                if answer.status_code >= 400:
                    raise PageError(f"HTTP {answer.status_code}")
                kind = answer.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower()
                if not kind.startswith((*_HTML, *_PLAIN)):
                    raise PageError(f"it is {kind}, which cannot be read as text")
                body = await _read_at_most(answer, self.max_bytes)
        except TimeoutError as failure:
            raise PageError(f"it did not answer within {self.timeout:g} s") from failure
        except PrivateAddress as failure:
            raise PageRefused(str(failure)) from failure
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise PageError(f"{type(failure).__name__}: {failure}") from failure
        text = body.decode(_find_charset(answer), errors="replace")
        if kind.startswith(_HTML):
            text = await asyncio.to_thread(html_to_text, text, str(answer.url))
        return WebPage(str(answer.url), text)

    async def close(self) -> None:
        await self._client.aclose()


async def _read_at_most(answer: httpx.Response, most: int) -> bytes:
    body = bytearray()
    async for chunk in answer.aiter_bytes():
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


def _find_charset(answer: httpx.Response) -> str:
    try:
        return codecs.lookup(answer.charset_encoding or "utf-8").name
    except LookupError:
        return "utf-8"


class JinaReader:
    """r.jina.ai, or a server that speaks as it does: `GET /ADDRESS` gives the page as markdown. It runs scripts and
    reads PDFs.

    Args:
        api_keys: one of them is used for each request; none: without a key, which is slower.
    """

    def __init__(self, api_keys: tuple[str, ...] = (), url: str = JINA_URL, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        key = random.choice(api_keys) if api_keys else None
        self._service = AsyncService(
            self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            retries=Retries(attempts=3, first_wait=1.0, longest_wait=4.0),
            transient=TRANSIENT_STATUSES - _FAULTS_OF_THE_PAGE,
        )

    async def probe(self) -> None:
        await self._service.probe()

    async def read(self, url: str) -> WebPage:
        if urlsplit(url).scheme not in ("http", "https"):
            raise PageError("only http and https addresses can be read")
        response = await self._service.request(path=f"/{url}", method="GET")
        if response.status in (401, 402, 403):
            raise InfraError(f"{self.url} refused: HTTP {response.status}: {response.text[:300]}")
        if response.status != 200:
            raise PageError(f"HTTP {response.status}: {response.text.strip()[:300]}")
        return WebPage(url, response.text)

    async def close(self) -> None:
        await self._service.close()
