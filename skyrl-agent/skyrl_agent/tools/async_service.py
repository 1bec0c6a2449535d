"""`skyrl_gym.services.Service` for an event loop: an HTTP server that may be temporarily unavailable."""

import asyncio
import json
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from skyrl_agent.errors import InfraError
from skyrl_gym.services import (
    FAULTS_OF_THE_REQUEST,
    IDLE_CONNECTION_SECONDS,
    MAX_BODY_BYTES,
    PASSING_STATUSES,
    PassingFailure,
    Response,
    Retries,
    certificates,
    is_loopback,
    origin_of,
    retry_after,
)

T = TypeVar("T")

RETRIES = Retries(attempts=5, first_wait=0.5, longest_wait=8.0, window=60.0)
PROBE_RETRIES = Retries(attempts=3, first_wait=0.5, longest_wait=1.0, window=5.0)
PROBE_SECONDS = 5.0


class RefusedRequest(ValueError):
    """The server rejected the model's input. The text is for the model."""


class AsyncService:
    """Client of one server, for use within one event loop.

    Args:
        headers: of each request, keys among them.
        timeout: seconds for one attempt, from connecting to the last byte.
        passing: statuses after which another attempt may do better.

    Raises:
        ValueError: `url` is not an http address.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        retries: Retries = RETRIES,
        passing: frozenset[int] = PASSING_STATUSES,
    ) -> None:
        origin_of(url, "url")
        self.url, self.timeout, self.retries, self.passing = url, timeout, retries, passing
        self._headers = dict(headers or {})
        self._client: httpx.AsyncClient | None = None

    async def json(self, body: object = None, **request: Any) -> Any:
        """Return the JSON of the server's reply; see `request`.

        Raises:
            RefusedRequest: status 400, 413 or 422, which the request's contents may cause.
            InfraError: see `request`; or a status other than 200, or no JSON.
        """
        response = await self.request(body, **request)
        if response.status in FAULTS_OF_THE_REQUEST:
            raise RefusedRequest(f"HTTP {response.status}: {response.text.strip()[:500]}")
        if response.status != 200:
            raise InfraError(f"{self.url} refused: HTTP {response.status}: {response.text.strip()[:500]}")
        try:
            return json.loads(response.body)
        except ValueError as failure:
            raise InfraError(f"{self.url}: the reply is not JSON: {failure}") from failure

    async def request(
        self, body: object = None, *, path: str = "", method: str = "POST", params: Mapping[str, str] | None = None
    ) -> Response:
        """Send `body` as JSON, with retries.

        Raises:
            InfraError: the last attempt failed, or one failed in a way that lasts.
        """
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return await self._send_once(method, self.url.rstrip("/") + path if path else self.url, body, params)
            except PassingFailure as fault:
                wait = self.retries.wait_before(attempt + 1, fault.asked)
                elapsed = time.monotonic() - started
                if attempt >= self.retries.attempts or elapsed + wait > self.retries.window:
                    raise InfraError(
                        f"{self.url} failed {attempt} times in {elapsed:.1f} s; last: {fault.text}"
                    ) from fault
            await asyncio.sleep(wait)

    async def probe(self) -> None:
        """Check within seconds that a server replies, with any status. Raises InfraError if none does."""
        service = AsyncService(
            self.url, headers=self._headers, timeout=PROBE_SECONDS, retries=PROBE_RETRIES, passing=frozenset()
        )
        try:
            await service.request(method="GET")
        finally:
            await service.close()

    async def _send_once(self, method: str, url: str, body: object, params: Mapping[str, str] | None) -> Response:
        content = None if body is None else json.dumps(body).encode()  # ASCII, so that lone surrogates pass
        headers = {"Content-Type": "application/json"} if content else {}
        received = bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._get_client().stream(method, url, content=content, headers=headers, params=params) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_BODY_BYTES:
                        raise InfraError(f"{self.url}: the reply is longer than {MAX_BODY_BYTES} bytes")
        except TimeoutError as failure:
            raise PassingFailure(f"no reply within {self.timeout:g} s") from failure
        except httpx.TransportError as failure:
            raise PassingFailure(f"{type(failure).__name__}: {failure}") from failure
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise InfraError(f"{self.url}: {type(failure).__name__}: {failure}") from failure
        response = Response(answer.status_code, answer.headers, bytes(received))
        if response.status in self.passing:
            raise PassingFailure(f"HTTP {response.status}: {response.text.strip()[:300]}", asked=retry_after(response))
        return response

    def _get_client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=None,  # one deadline for the whole attempt, above
                follow_redirects=True,
                trust_env=not is_loopback(urlsplit(self.url).hostname),
                limits=httpx.Limits(keepalive_expiry=IDLE_CONNECTION_SECONDS),
                verify=certificates(),
            )
        return self._client

    async def close(self) -> None:
        """Close the connections. May be called more than once, and before further requests."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


async def together(*waited: Awaitable[T]) -> list[T]:
    """Return all results. The first exception cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in waited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
