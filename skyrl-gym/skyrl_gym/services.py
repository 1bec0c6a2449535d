"""Client of a JSON service over HTTP that may be temporarily unavailable: a retriever, a judge, a model.

Transient errors (connection refused, timeout, broken connection, a transient status) are retried for a while and then
raise `InfraError`. Any other response is returned to the caller.
"""

import functools
import json
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skyrl_gym.error import InfraError
from skyrl_gym.waits import waiting

if TYPE_CHECKING:  # httpx loads it when a connection is made
    import ssl

logger = logging.getLogger(__name__)

FAULTS_OF_THE_REQUEST = frozenset({400, 413, 422})
"""Only these may be due to what a model wrote. A wrong address or missing rights are the same for every request."""

PASSING_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})

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
        started, attempt = time.monotonic(), 0
        while not self.cancelled.is_set():
            attempt += 1
            if label:
                logger.info("%s, attempt %d", label, attempt)
            try:
                with waiting(f"the reply to {method}", on=url, deadline=self.timeout):
                    return self._attempt(connections, method, url, content)
            except PassingFailure as fault:
                at_once = fault.dropped and attempt == 1
                wait = 0.0 if at_once else self.retries.wait_before(attempt + 1, fault.asked)
                elapsed = time.monotonic() - started
                if attempt == self.retries.attempts or elapsed + wait > self.retries.window:
                    times = "1 time" if attempt == 1 else f"{attempt} times"
                    raise InfraError(f"{url} failed {times} in {elapsed:.1f} s; last: {fault.text}") from fault
                if label:
                    logger.warning("%s: %s; again in %.1f s", label, fault.text, wait)
            self.cancelled.wait(wait)
        raise Cancelled

    def _attempt(self, connections: "Connections", method: str, url: str, content: bytes) -> Response:
        """Raises PassingFailure, and InfraError for what would fail again."""
        import httpx

        deadline = time.monotonic() + self.timeout
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS))
        headers = {"Content-Type": "application/json", **self._headers}
        body = bytearray()
        try:
            with connections.client.stream(method, url, content=content, headers=headers, timeout=timeout) as answer:
                for chunk in answer.iter_bytes():
                    body += chunk
                    # A read timeout starts again with each chunk; this one is for the whole reply.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer trickled in too slowly")
                    if len(body) > MAX_BODY_BYTES:
                        raise InfraError(f"{url}: the answer is longer than {MAX_BODY_BYTES} bytes")
        except httpx.ConnectTimeout as failure:
            raise PassingFailure(f"timeout: no connection within {timeout.connect:g} s") from failure
        except httpx.TimeoutException as failure:
            raise PassingFailure(f"timeout: no answer within {self.timeout:g} s") from failure
        except (httpx.ConnectError, httpx.ProxyError) as failure:
            raise PassingFailure(f"{type(failure).__name__}: {failure}") from failure
        except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
            raise PassingFailure(f"{type(failure).__name__}: {failure}", dropped=True) from failure
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise InfraError(f"{url}: {type(failure).__name__}: {failure}") from failure
        response = Response(answer.status_code, answer.headers, bytes(body))
        if response.status in PASSING_STATUSES:
            raise PassingFailure(f"status {response.status}: {response.text:.300}", asked=retry_after(response))
        return response

    def _connect(self) -> "Connections":
        connections = self._connections
        if connections is None or connections.process != os.getpid():
            connections = self._connections = connections_to(self._origin)
        return connections

    def close(self) -> None:
        """Release the connections. May be called more than once, and before further requests."""
        self._connections = None


@dataclass(eq=False)
class PassingFailure(Exception):
    """One attempt failed; another may not."""

    text: str
    dropped: bool = False
    """The connection was closed on us, as happens to one that has idled: nothing has to be waited for."""
    asked: float = 0.0
    """Seconds for which the server wants to be left alone."""


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
        # No bound on open connections: there are as many as threads that ask, and a bound would make some of them wait.
        limits = httpx.Limits(max_keepalive_connections=256, keepalive_expiry=IDLE_CONNECTION_SECONDS)
        # A proxy that the machine sets for the internet does not know our loopback.
        trust_env = not is_loopback(urlsplit(origin).hostname)
        self.client = httpx.Client(limits=limits, follow_redirects=True, trust_env=trust_env, verify=certificates())
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
