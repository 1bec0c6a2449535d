"""The search tool: asks a retrieval server over HTTP, and stays calm while that server is away for a moment.

Faults are told apart by who can mend them. What is wrong with the request (a query that is too long, say) is told to
the model. What is wrong with the server is tried again for a while, and is then an `InfraError`: it says nothing about
what the model did. `skyrl_gym.tools.retrieval` is a server that answers.
"""

import json
import logging
import os
import random
import threading
import time
import uuid
import weakref
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyrl_gym.error import InfraError
from skyrl_gym.tools.core import ToolGroup, tool

if TYPE_CHECKING:
    import httpx  # imported where it is used: `import skyrl_gym` stays light

logger = logging.getLogger(__name__)

DEFAULT_SEARCH_URL = "http://127.0.0.1:8000/retrieve"
DEFAULT_TIMEOUT = 30
"""Seconds for one request, from connecting to the last byte."""
MAX_RETRIES = 10
"""Requests for one query, the first included."""
INITIAL_RETRY_DELAY = 1
"""Seconds before the second request; doubled with each further one."""
MAX_RETRY_DELAY = 8
"""Seconds; the doubling ends here."""
DEFAULT_RETRY_SECONDS = 60
"""No request is begun later than this after the first one: long enough for a server to be started again."""

MAX_RESPONSE_BYTES = 64 << 20
IDLE_CONNECTION_SECONDS = 4
"""Below the 5 s after which common servers close an idle connection, so that few requests meet a closed one."""

_FAULTS_OF_THE_REQUEST = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""Only these may be due to what the model wrote. A wrong address or missing rights are the same for every query."""


def call_search_api(
    retrieval_service_url: str,
    query: str,
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    log_requests: bool = True,
    session: "httpx.Client | None" = None,
    *,
    max_retries: int = MAX_RETRIES,
    retry_seconds: float = DEFAULT_RETRY_SECONDS,
) -> tuple[Any | None, str | None]:
    """Asks a retrieval server for the documents that answer a query.

    A request that meets no server, a time-out, a broken connection or a status of 500 and above (or 429) is made again
    after a growing, random delay: at most `max_retries` requests, none later than `retry_seconds` after the first.

    Args:
        timeout: seconds for each request; one that is answered in pieces may end up to as much later.
        log_requests: log each request, and each that is made again.
        session: client to use; else the one that everything in this process shares for this server.

    Returns:
        (answer, None), or (None, text) if the server finds fault with the request, or if its answer is not JSON.

    Raises:
        InfraError: the server still failed at the last request, or the address or rights are wrong.
    """
    label = uuid.uuid4().hex[:8]
    shared = None if session else shared_client(base_url_of(retrieval_service_url))
    client = session or shared.http  # pyright: ignore[reportOptionalMemberAccess]
    payload = {"query": _encodable(query), "topk": topk, "return_scores": return_scores}
    started = time.monotonic()
    for attempt in range(1, max_retries + 1):
        if log_requests:
            logger.info("search %s: %r, request %d", label, query, attempt)
        try:
            return _request(client, retrieval_service_url, payload, timeout)
        except _ServerFault as fault:
            delay = fault.delay_before(attempt + 1)
            elapsed = time.monotonic() - started
            if attempt == max_retries or not fault.passing or elapsed + delay > retry_seconds:
                raise InfraError(
                    f"Search error: {retrieval_service_url} failed {attempt} time{'s' * (attempt > 1)} "
                    f"in {elapsed:.1f} s; last: {fault}"
                ) from fault
            if log_requests:
                logger.warning("search %s: %s; again in %.1f s", label, fault, delay)
            time.sleep(delay)
    raise ValueError(f"max_retries must be at least 1; got {max_retries}")


class _ServerFault(Exception):
    """One request failed for a reason that is not in the request."""

    def __init__(self, text: str, *, passing: bool = True, dropped: bool = False) -> None:
        super().__init__(text)
        self.passing = passing
        """It may be over in a moment."""
        self.dropped = dropped
        """The connection was closed on us, as happens to one that has idled: nothing has to be waited for."""

    def delay_before(self, attempt: int) -> float:
        """Seconds. Random, or all environments would come back at once."""
        if self.dropped and attempt == 2:
            return 0.0
        return random.uniform(0.5, 1.0) * min(MAX_RETRY_DELAY, INITIAL_RETRY_DELAY * 2 ** (attempt - 2))


def _request(client: "httpx.Client", url: str, payload: dict[str, Any], timeout: float) -> tuple[Any, str | None]:
    import httpx

    try:
        status, body = _post(client, url, payload, timeout)
    except httpx.TimeoutException as failure:
        raise _ServerFault(f"timeout: no answer within {timeout:g} s") from failure
    except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
        dropped = not isinstance(failure, httpx.ConnectError)
        raise _ServerFault(f"{type(failure).__name__}: {failure}", dropped=dropped) from failure
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        raise _ServerFault(f"{type(failure).__name__}: {failure}", passing=False) from failure

    if status in _FAULTS_OF_THE_REQUEST:
        return None, f"HTTP {status}: {_detail(body)}"
    if status != HTTPStatus.OK:
        passing = status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS
        raise _ServerFault(f"HTTP {status}: {_detail(body)}", passing=passing)
    try:
        return json.loads(body), None
    except ValueError as failure:
        return None, f"the answer is not JSON: {failure}"


def _post(client: "httpx.Client", url: str, payload: dict[str, Any], timeout: float) -> tuple[int, bytes]:
    """Status and body. The client's own time-out is for each read; the deadline is for all of them together."""
    import httpx

    deadline = time.monotonic() + timeout
    body = bytearray()
    with client.stream("POST", url, json=payload, timeout=timeout) as response:
        for chunk in response.iter_bytes():
            body += chunk
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the answer trickled in too slowly")
            if len(body) > MAX_RESPONSE_BYTES:
                raise httpx.DecodingError(f"the answer is longer than {MAX_RESPONSE_BYTES} bytes")
    return response.status_code, bytes(body)


def _detail(body: bytes) -> str:
    """What a server says about an error: `detail` of a JSON answer, else its beginning."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = body.decode(errors="replace").strip()
    return str(detail)[:500]


def _encodable(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form, and a model may write one."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


class SharedClient:
    """A client of one server, closed when the last one who holds it is gone."""

    def __init__(self, base_url: str) -> None:
        import httpx

        loopback = urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")
        # No bound on open connections: there are as many as threads that ask, and a bound would make some of them wait.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_CONNECTION_SECONDS
        )
        # A proxy that the machine sets for the internet does not know our loopback.
        self.http = httpx.Client(limits=limits, follow_redirects=True, trust_env=not loopback)
        weakref.finalize(self, self.http.close)


_shared_clients: "weakref.WeakValueDictionary[tuple[int, str], SharedClient]" = weakref.WeakValueDictionary()
_shared_clients_lock = threading.Lock()


def shared_client(base_url: str) -> SharedClient:
    """The client that everything in this process shares for one server. Safe from any thread."""
    key = (os.getpid(), base_url)  # connections do not survive a fork
    with _shared_clients_lock:
        client = _shared_clients.get(key)
        if client is None:
            client = _shared_clients[key] = SharedClient(base_url)
        return client


def base_url_of(url: str) -> str:
    """`scheme://host:port` of an address. Raises ValueError if it is not an http address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"search_url must be an address such as {DEFAULT_SEARCH_URL}; got {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


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
        """Raises ValueError if `search_url` is not an http address. No server is asked before the first search."""
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self.log_requests = log_requests
        self.retry_seconds = retry_seconds
        self.base_url = base_url_of(search_url)
        self._client = shared_client(self.base_url)
        self.session = self._client.http
        super().__init__(name="SearchToolGroup")

    @tool
    def search(self, query: str | None) -> str:
        """Searches for documents that answer a query.

        Args:
            query: What to look for, in words.

        Returns:
            A JSON object as text: `result` holds the documents, numbered from 1, or what was wrong with the query.
            Nothing if there is no query.

        Raises:
            InfraError: as `call_search_api`.
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
            retry_seconds=self.retry_seconds,
        )
        return json.dumps({"result": _result_text(answer, error)})


def _result_text(answer: Any | None, error: str | None) -> str:
    if error is not None:
        return f"Search error: {error}"
    if answer is None:
        return "Search error: unknown API state, neither an answer nor an error."
    try:
        groups = answer["result"]
        return "\n---\n".join(_documents_text(group) for group in groups if group) or "No search results found."
    except (KeyError, TypeError, AttributeError) as failure:
        return f"Error processing search results: {type(failure).__name__}: {failure}"


def _documents_text(group: list[dict[str, Any]]) -> str:
    """The documents of one query, each with its number. They come bare, or with their scores."""
    documents = [item.get("document", item) for item in group]
    return "".join(f"Doc {number}: {document['contents'].strip()}\n" for number, document in enumerate(documents, 1))
