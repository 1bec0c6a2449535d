"""Clients of a JSON service over HTTP that may be temporarily unavailable: a retriever, a judge, a model.

`Service` is for threads, `AsyncService` for an event loop. Transient errors (connection refused, timeout, broken
connection, a transient status) are retried for a while and then raise `InfraError`. Any other response is returned to
the caller.
"""

import asyncio
import functools
import json
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyrl_gym.error import InfraError
from skyrl_gym.waits import waiting

if TYPE_CHECKING:  # httpx loads it when a connection is made
    import ssl

    import httpx

logger = logging.getLogger(__name__)

FAULTS_OF_THE_REQUEST = frozenset({400, 413, 422})
"""Only these may be due to what a model wrote. A wrong address or missing rights are the same for every request."""

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

MAX_BODY_BYTES = 64 << 20
"""Maximum size of a response; a longer one is a failure."""
CONNECT_SECONDS = 10.0
"""Maximum time to connect: an unreachable address is noticed long before a slow response times out."""
IDLE_CONNECTION_SECONDS = 4.0
"""Time after which an idle connection is closed: below the 5 s of common servers, so that few requests meet a
connection that the server has closed."""


class Cancelled(Exception):
    """The caller cancelled the request."""


@dataclass(frozen=True)
class Retries:
    """Retry policy of a request."""

    attempts: float = 5
    """The first included; `math.inf` leaves it to the window."""
    first_wait: float = 0.5
    """Seconds before the second attempt, at most; doubled with each further one."""
    longest_wait: float = 30.0
    """Seconds; the doubling ends here, and so does what a server may ask for."""
    window: float = math.inf
    """No attempt is begun later than this many seconds after the first."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"a request needs at least 1 attempt; got {self.attempts}")

    def wait_before(self, attempt: int, asked: float) -> float:
        """Seconds before attempt 2, 3 ...: not less than the server asked for. Random, or all would come at once."""
        longest = min(self.longest_wait, self.first_wait * 2 ** min(attempt - 2, 32))
        return max(random.uniform(0.5, 1.0) * longest, min(asked, self.longest_wait))


ASYNC_RETRIES = Retries(attempts=5, first_wait=0.5, longest_wait=8.0, window=60.0)
PROBE_RETRIES = Retries(attempts=3, first_wait=0.5, longest_wait=1.0, window=5.0)
PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Response:
    """Reply of a service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Service:
    """Client of one HTTP service. Thread-safe.

    Args:
        url: where it is.
        api_key: sent as a bearer token, if there is one.
        timeout: seconds for one attempt, from connecting to the last byte; one answered in pieces may take twice that.
        cancelled: when set, waiting ends and no further attempt is made.
        connections: by default those that everything in this process shares for this host.

    Raises:
        ValueError: `url` is not an http address.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: Retries | None = None,
        cancelled: threading.Event | None = None,
        connections: "Connections | None" = None,
    ) -> None:
        self.url = url
        self._origin = origin_of(url)
        self.timeout = timeout
        self.retries = retries or Retries()
        self.cancelled = cancelled or threading.Event()
        self._headers = {"Authorization": f"Bearer {api_key.strip()}"} if api_key else {}
        self._connections = connections

    def request(
        self, body: object = None, *, path: str = "", method: str = "POST", label: str | None = None
    ) -> Response:
        """Send `body` as JSON to the service's address, with `path` appended, with retries.

        Args:
            label: name under which each attempt is logged; nothing is without.

        Raises:
            InfraError: the last attempt failed, or one failed in a way that lasts.
            Cancelled: see above.
        """
        url = self.url.rstrip("/") + path if path else self.url
        content = b"" if body is None else json.dumps(body, default=_to_plain).encode()  # ASCII: lone surrogates pass
        connections = self._connect()  # held until the end, or a `close` meanwhile would end this request
        attempts = _Attempts(url, self.retries)
        while not self.cancelled.is_set():
            if label:
                logger.info("%s, attempt %d", label, attempts.number)
            try:
                with waiting(f"the reply to {method}", on=url, deadline=self.timeout):
                    return self._send_once(connections, method, url, content)
            except TransientError as error:
                wait = attempts.wait_after(error)
                if label:
                    logger.warning("%s: %s; retrying in %.1f s", label, error.text, wait)
            self.cancelled.wait(wait)
        raise Cancelled

    def _send_once(self, connections: "Connections", method: str, url: str, content: bytes) -> Response:
        """Raises TransientError, and InfraError for errors that would occur again."""
        import httpx

        deadline = time.monotonic() + self.timeout
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS))
        headers = {"Content-Type": "application/json", **self._headers}
        body = bytearray()
        with (
            _classify_errors(url, self.timeout),
            connections.client.stream(method, url, content=content, headers=headers, timeout=timeout) as response,
        ):
            for chunk in response.iter_bytes():
                _append(body, chunk, url)
                # A read timeout restarts with each chunk; this one is for the whole reply.
                if time.monotonic() > deadline:
                    raise TimeoutError
        return _to_response(response, body, TRANSIENT_STATUSES)

    def _connect(self) -> "Connections":
        connections = self._connections
        if connections is None or connections.process != os.getpid():
            connections = self._connections = connections_to(self._origin)
        return connections

    def close(self) -> None:
        """Release the connections. May be called more than once, and before further requests."""
        self._connections = None


class RefusedRequest(ValueError):
    """The service rejected the content of a request. The text is for the model that wrote it."""


class AsyncService:
    """Client of one HTTP service, for use within one event loop.

    Args:
        headers: of each request, keys included.
        timeout: seconds for one attempt, from connecting to the last byte.
        transient: statuses after which a request is retried.

    Raises:
        ValueError: `url` is not an http address.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        retries: Retries = ASYNC_RETRIES,
        transient: frozenset[int] = TRANSIENT_STATUSES,
    ) -> None:
        origin_of(url, "url")
        self.url, self.timeout, self.retries, self.transient = url, timeout, retries, transient
        self._headers = dict(headers or {})
        self._client: httpx.AsyncClient | None = None

    async def json(self, body: object = None, **request: Any) -> Any:
        """Return the JSON of the reply; see `request`.

        Raises:
            RefusedRequest: status 400, 413 or 422, which the request's content may cause.
            InfraError: see `request`; or a status other than 200, or no JSON.
        """
        response = await self.request(body, **request)
        if response.status in FAULTS_OF_THE_REQUEST:
            raise RefusedRequest(f"HTTP {response.status}: {response.text.strip()[:500]}")
        if response.status != 200:
            raise InfraError(f"{self.url} rejected the request: HTTP {response.status}: {response.text.strip()[:500]}")
        try:
            return json.loads(response.body)
        except ValueError as failure:
            raise InfraError(f"{self.url}: the reply is not JSON: {failure}") from failure

    async def request(
        self, body: object = None, *, path: str = "", method: str = "POST", params: Mapping[str, str] | None = None
    ) -> Response:
        """Send `body` as JSON, with retries.

        Raises:
            InfraError: the last attempt failed, or an attempt failed with a permanent error.
        """
        url = self.url.rstrip("/") + path if path else self.url
        attempts = _Attempts(url, self.retries)
        while True:
            try:
                return await self._send_once(method, url, body, params)
            except TransientError as error:
                wait = attempts.wait_after(error)
            await asyncio.sleep(wait)

    async def probe(self) -> None:
        """Check within seconds that the service replies, with any status. Raises InfraError if it does not."""
        service = AsyncService(
            self.url, headers=self._headers, timeout=PROBE_SECONDS, retries=PROBE_RETRIES, transient=frozenset()
        )
        try:
            await service.request(method="GET")
        finally:
            await service.close()

    async def _send_once(self, method: str, url: str, body: object, params: Mapping[str, str] | None) -> Response:
        content = None if body is None else json.dumps(body).encode()  # ASCII, so that lone surrogates pass
        headers = {"Content-Type": "application/json"} if content else {}
        received = bytearray()
        with _classify_errors(url, self.timeout):
            async with (
                asyncio.timeout(self.timeout),
                self._get_client().stream(method, url, content=content, headers=headers, params=params) as response,
            ):
                async for chunk in response.aiter_bytes():
                    _append(received, chunk, url)
        return _to_response(response, received, self.transient)

    def _get_client(self) -> "httpx.AsyncClient":
        import httpx

        if self._client is None:
            # No timeout of httpx: one deadline bounds the whole attempt.
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, **_client_options(self.url))
        return self._client

    async def close(self) -> None:
        """Close the connections. May be called more than once, and before further requests."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


# ---- shared by both


@dataclass(eq=False)
class TransientError(Exception):
    """One attempt failed; another may succeed."""

    text: str
    dropped: bool = False
    """The server closed an idle connection: retry without waiting."""
    asked: float = 0.0
    """Seconds that the server asked to wait."""


class _Attempts:
    """Attempts of one request to `url`."""

    def __init__(self, url: str, retries: Retries):
        self.number = 1
        self._url, self._retries, self._started = url, retries, time.monotonic()

    def wait_after(self, error: TransientError) -> float:
        """Return seconds before the next attempt. Raises InfraError if there is none left."""
        at_once = error.dropped and self.number == 1
        wait = 0.0 if at_once else self._retries.wait_before(self.number + 1, error.asked)
        elapsed = time.monotonic() - self._started
        if self.number >= self._retries.attempts or elapsed + wait > self._retries.window:
            times = "1 time" if self.number == 1 else f"{self.number} times"
            raise InfraError(f"{self._url} failed {times} in {elapsed:.1f} s; last: {error.text}") from error
        self.number += 1
        return wait


@contextmanager
def _classify_errors(url: str, seconds: float) -> Iterator[None]:
    """Convert errors of httpx and timeouts to TransientError, and to InfraError if they are permanent."""
    import httpx

    try:
        yield
    except httpx.ConnectTimeout as failure:
        raise TransientError("timeout: no connection") from failure
    except (TimeoutError, httpx.TimeoutException) as failure:
        raise TransientError(f"timeout: no reply within {seconds:g} s") from failure
    except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError) as failure:
        is_dropped = isinstance(failure, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)
        raise TransientError(f"{type(failure).__name__}: {failure}", dropped=is_dropped) from failure
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        raise InfraError(f"{url}: {type(failure).__name__}: {failure}") from failure


def _append(body: bytearray, chunk: bytes, url: str) -> None:
    body += chunk
    if len(body) > MAX_BODY_BYTES:
        raise InfraError(f"{url}: the reply is longer than {MAX_BODY_BYTES} bytes")


def _to_response(response: "httpx.Response", body: bytearray, transient: frozenset[int]) -> Response:
    """Return the reply. Raises TransientError for a transient status."""
    reply = Response(response.status_code, response.headers, bytes(body))
    if reply.status in transient:
        raise TransientError(f"HTTP {reply.status}: {reply.text.strip()[:300]}", asked=retry_after(reply))
    return reply


def _client_options(url: str) -> dict[str, Any]:
    import httpx

    return {
        "follow_redirects": True,
        # A proxy that the machine sets for the internet does not know our loopback.
        "trust_env": not is_loopback(urlsplit(url).hostname),
        # No bound on open connections: there are as many as requests, and a bound would make some of them wait.
        "limits": httpx.Limits(max_keepalive_connections=256, keepalive_expiry=IDLE_CONNECTION_SECONDS),
        "verify": certificates(),
    }


def retry_after(response: Response) -> float:
    """Seconds from the header, which gives seconds or a date; 0 if it gives neither."""
    from email.utils import parsedate_to_datetime

    value = response.headers.get("Retry-After", "0")
    try:
        return float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


def _to_plain(value: Iterable[object]) -> object:
    """Convert settings of a configuration library to JSON values."""
    return dict(value) if isinstance(value, Mapping) else list(value)


class Connections:
    """Connections of this process to one host; closed when they are no longer referenced."""

    def __init__(self, origin: str) -> None:
        import httpx  # only when a service is used: `import skyrl_gym` stays light

        self.process = os.getpid()
        self.client = httpx.Client(**_client_options(origin))
        # Not `__del__`: also called at the exit of the interpreter, in time for sockets to be closed.
        weakref.finalize(self, self.client.close)


_shared: "weakref.WeakValueDictionary[tuple[int, str], Connections]" = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def connections_to(origin: str) -> Connections:
    """Return the connections that everything in this process shares. Safe from any thread."""
    key = (os.getpid(), origin)  # connections do not survive a fork
    with _shared_lock:
        connections = _shared.get(key) or Connections(origin)
        _shared[key] = connections
        return connections


def origin_of(url: str, setting: str = "base_url") -> str:
    """`scheme://host:port` of an address. Raises ValueError, which names the setting, if it is not an http address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{setting} must be an address such as http://127.0.0.1:8000; got {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


def is_loopback(host: str | None) -> bool:
    """Return whether a host name means this machine, which a proxy that is set for the internet does not know."""
    return host in LOOPBACK_NAMES


@functools.cache
def certificates() -> "ssl.SSLContext":
    """Load the certificates once: it takes longer than most requests."""
    import httpx

    return httpx.create_ssl_context()
