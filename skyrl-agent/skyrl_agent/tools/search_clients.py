"""Search services: classes with one method, `search`. Know no tools."""

from dataclasses import dataclass
from typing import Protocol

from skyrl_agent.errors import InfraError
from skyrl_agent.types import JsonObject
from skyrl_gym.services import PROBE_RETRIES, AsyncService, Retries

SERPER_URL = "https://google.serper.dev/search"
YOUCOM_URL = "https://ydc-index.io/v1/search"

RETRIEVER_RETRIES = Retries(attempts=10, first_wait=1.0, longest_wait=8.0, window=60.0)
"""Long enough for a retrieval server to be started again."""


@dataclass(frozen=True)
class Hit:
    """One thing found."""

    title: str
    url: str
    text: str
    """The document, or the part of it that a search engine shows."""


class SearchClient(Protocol):
    """Interface of search services."""

    async def search(self, query: str, num: int) -> list[Hit]:
        """Return at most `num` hits, the best first.

        Raises:
            ValueError: the query is wrong; the text is for the model.
            InfraError: the server failed.
        """
        ...

    async def close(self) -> None: ...


class _ServiceClient:
    def __init__(self, service: AsyncService) -> None:
        self.service = service

    async def close(self) -> None:
        await self.service.close()

    async def probe(self) -> None:
        await self.service.probe()

    def build_unreadable_error(self, answer: object, failure: Exception) -> InfraError:
        return InfraError(f"{self.service.url}: response in an unknown format ({failure!r}): {str(answer)[:300]}")


class RetrieverClient(_ServiceClient):
    """A retrieval server such as `python -m skyrl_gym.tools.retrieval`: `POST {"queries", "topk", "return_scores"}`."""

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        super().__init__(AsyncService(url, timeout=timeout, retries=RETRIEVER_RETRIES))

    async def probe(self) -> None:
        """Send a test query: another server or path would reply in another format."""
        service = AsyncService(self.service.url, timeout=self.service.timeout, retries=PROBE_RETRIES)
        try:
            await self._send_queries(service, "probe", 1)
        except ValueError as error:
            raise InfraError(f"{service.url} is not a retrieval server: {error}") from error
        finally:
            await service.close()

    async def search(self, query: str, num: int) -> list[Hit]:
        return await self._send_queries(self.service, query, num)

    async def _send_queries(self, service: AsyncService, query: str, num: int) -> list[Hit]:
        answer = await service.json({"queries": [query], "topk": num, "return_scores": True})
        try:
            (group,) = answer["result"]
            return [_split_document(item.get("document", item)) for item in group]
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise self.build_unreadable_error(answer, failure) from failure


def _split_document(document: JsonObject) -> Hit:
    """Split a document into the title (first line) and the text."""
    title, _, text = document["contents"].strip().partition("\n")
    return Hit(title, str(document.get("url") or document.get("id") or ""), text)


class SerperClient(_ServiceClient):
    """Google's results by serper.dev."""

    def __init__(self, api_key: str, url: str = SERPER_URL, timeout: float = 10.0) -> None:
        super().__init__(AsyncService(url, headers={"X-API-KEY": api_key}, timeout=timeout))

    async def search(self, query: str, num: int) -> list[Hit]:
        answer = await self.service.json({"q": query, "num": num})
        try:
            return [_parse_hit(item, "link", item.get("snippet")) for item in answer.get("organic", [])][:num]
        except (KeyError, TypeError, AttributeError) as failure:
            raise self.build_unreadable_error(answer, failure) from failure


class YoucomClient(_ServiceClient):
    """You.com: pages, then news."""

    def __init__(self, api_key: str, url: str = YOUCOM_URL, timeout: float = 10.0) -> None:
        super().__init__(AsyncService(url, headers={"X-API-Key": api_key}, timeout=timeout))

    async def search(self, query: str, num: int) -> list[Hit]:
        answer = await self.service.json(method="GET", params={"query": query, "count": str(num)})
        try:
            results = answer.get("results") or {}
            found = [*(results.get("web") or []), *(results.get("news") or [])]
            return [
                _parse_hit(item, "url", " ".join(item.get("snippets") or [item.get("description") or ""]))
                for item in found
            ]
        except (KeyError, TypeError, AttributeError) as failure:
            raise self.build_unreadable_error(answer, failure) from failure


def _parse_hit(item: JsonObject, url: str, text: str | None) -> Hit:
    return Hit(item.get("title") or item[url], item[url], text or "")
