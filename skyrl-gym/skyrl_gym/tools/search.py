"""Search tool: queries a retrieval server over HTTP, with retries while that server is unavailable.

Errors are divided by who can fix them. Errors of the request (a query that is too long, say) are reported to the model.
Errors of the server are retried for a while and then raised as `InfraError`: they say nothing about the model.
`skyrl_gym.tools.retrieval` is a suitable server.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from skyrl_gym.error import InfraError
from skyrl_gym.services import FAULTS_OF_THE_REQUEST, Connections, Retries, Service, connections_to, origin_of
from skyrl_gym.tools.core import ToolGroup, tool
from skyrl_gym.valid_unicode import replace_lone_surrogates

DEFAULT_SEARCH_URL = "http://127.0.0.1:8000/retrieve"
DEFAULT_TIMEOUT = 30
"""Seconds for one request, from connecting to the last byte."""
MAX_RETRIES = 10
"""Requests for one query, the first included."""
INITIAL_RETRY_DELAY = 1
"""Seconds before the second request, at most; doubled with each further one."""
MAX_RETRY_DELAY = 8
"""Seconds; the doubling ends here."""
DEFAULT_RETRY_SECONDS = 60
"""No request is begun later than this after the first one: long enough for a server to be started again."""


def call_search_api(
    retrieval_service_url: str,
    query: str,
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    log_requests: bool = True,
    session: Connections | None = None,
    *,
    max_retries: int = MAX_RETRIES,
    retry_seconds: float = DEFAULT_RETRY_SECONDS,
) -> tuple[Any | None, str | None]:
    """Query a retrieval server for documents.

    A request that meets no server, a time-out, a broken connection or a server in trouble is made again after a
    growing, random delay: at most `max_retries` requests, none later than `retry_seconds` after the first.

    Args:
        timeout: seconds for each request; one that is answered in pieces may end up to as much later.
        log_requests: log each request, and each that is made again.
        session: connections to use; else those that everything in this process shares for this server.

    Returns:
        (answer, None), or (None, text) if the server finds fault with the request.

    Raises:
        InfraError: the server still failed at the last request, the address or rights are wrong, or the body is not
            JSON (the page of a proxy, say).
    """
    retries = Retries(max_retries, INITIAL_RETRY_DELAY, MAX_RETRY_DELAY, retry_seconds)
    service = Service(retrieval_service_url, timeout=timeout, retries=retries, connections=session)
    payload = {"query": replace_lone_surrogates(query), "topk": topk, "return_scores": return_scores}
    label = f"search {uuid.uuid4().hex[:8]} {query!r}" if log_requests else None
    try:
        response = service.request(payload, label=label)
    except InfraError as failure:
        raise InfraError(f"Search error: {failure}") from failure
    if response.status in FAULTS_OF_THE_REQUEST:
        return None, f"HTTP {response.status}: {_extract_detail(response.text)}"
    if response.status != 200:
        raise InfraError(
            f"Search error: {service.url} refused: HTTP {response.status}: {_extract_detail(response.text)}"
        )
    try:
        return json.loads(response.body), None
    except ValueError as failure:
        raise InfraError(
            f"Search error: {service.url} sent no JSON: {failure}; {_beginning(response.text)}"
        ) from failure


def _extract_detail(text: str) -> str:
    """Return a server's error message: `detail` of a JSON reply, else its beginning."""
    try:
        return str(json.loads(text)["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return _beginning(text)


def _beginning(text: str) -> str:
    return text.strip()[:500] or "(an empty body)"


@dataclass
class SearchSettings:
    """Settings of environments with the search tool."""

    log_requests: bool = False
    """Log each request to the retrieval server."""
    search_url: str = DEFAULT_SEARCH_URL
    """Address of a retrieval server; `python -m skyrl_gym.tools.retrieval` is one."""
    topk: int = 3
    """Documents returned per query."""
    timeout: float = DEFAULT_TIMEOUT
    """Timeout of one request to the retrieval server, in seconds."""
    retry_seconds: float = DEFAULT_RETRY_SECONDS
    """Time in seconds for which a request is retried while the server fails; then the episode fails."""

    def tool_group(self) -> "SearchToolGroup":
        return SearchToolGroup(self.search_url, self.topk, self.timeout, self.log_requests, self.retry_seconds)


class SearchToolGroup(ToolGroup):
    """One tool, `search`."""

    def __init__(
        self,
        search_url: str = DEFAULT_SEARCH_URL,
        topk: int = 3,
        timeout: float = DEFAULT_TIMEOUT,
        log_requests: bool = True,
        retry_seconds: float = DEFAULT_RETRY_SECONDS,
    ) -> None:
        """Raises ValueError if `search_url` is not an http address. No request is sent before the first search."""
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self.log_requests = log_requests
        self.retry_seconds = retry_seconds
        self.base_url = origin_of(search_url, "search_url")
        self.session = connections_to(self.base_url)
        super().__init__(name="SearchToolGroup")

    @tool
    def search(self, query: str | None) -> str:
        """Searches for documents that answer a query.

        Args:
            query: What to look for, in words.

        Returns:
            A JSON object as text: `result` holds the documents, numbered from 1, or what was wrong with the query.
            Empty without a query.

        Raises:
            InfraError: as `call_search_api`, or the response has no documents of the expected form.
        """
        if query is None:
            return ""
        answer, error = call_search_api(
            retrieval_service_url=self.search_url,
            query=query.strip(),
            topk=self.topk,
            return_scores=True,
            timeout=self.timeout,
            log_requests=self.log_requests,
            session=self.session,
            **self._retries(),
        )
        return json.dumps({"result": _format_result(answer, error)})

    def _retries(self) -> dict[str, Any]:
        """Return the retry window as an argument, if it was set: a stand-in for `call_search_api` need not know it."""
        return {} if self.retry_seconds == DEFAULT_RETRY_SECONDS else {"retry_seconds": self.retry_seconds}


def _format_result(answer: Any | None, error: str | None) -> str:
    """Format the response. Raises InfraError for an invalid one: with status 200 it is not the query's fault."""
    if error is not None:
        return f"Search error: {error}"
    try:
        groups = answer["result"]  # pyright: ignore[reportOptionalSubscript]
        return "\n---\n".join(_format_documents(group) for group in groups if group) or "No search results found."
    except (KeyError, TypeError, AttributeError) as failure:
        raise InfraError(
            "Search error: the server's answer must have the form "
            '{"result": [[{"document": {"contents": "..."}}]]}; '
            f"got {json.dumps(answer, default=str)[:500]} ({type(failure).__name__}: {failure})"
        ) from failure


def _format_documents(group: list[dict[str, Any]]) -> str:
    """Format the numbered documents of a query, which may be bare or have scores."""
    documents = [item.get("document", item) for item in group]
    return "".join(f"Doc {number}: {document['contents'].strip()}\n" for number, document in enumerate(documents, 1))
