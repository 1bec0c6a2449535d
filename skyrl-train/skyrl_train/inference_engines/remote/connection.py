"""HTTP connection to an external server: every call has a deadline, every failure names the server.

TCP connections are not reused. Requests take seconds, so reuse would not help, and the server may close an idle
connection (uvicorn after 5 s) just when it is used again, leaving unknown whether the request was computed. It also
makes the connection usable from any event loop.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx
from pydantic import SecretStr

from skyrl_gym.waits import waiting
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.utils.explanations import write_explanation

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_MOST_TEXT_SHOWN = 600


class ServerError(WorkerError):
    """Error status from the server.

    Args:
        url, path: requested URL
        status: HTTP status
        said: error text of the server
    """

    def __init__(self, url: str, path: str, status: int, said: str):
        super().__init__(f"the server at {url} answered {path} with status {status}: {said}")
        self.status = status
        self.said = said


class ServerRefused(ServerError):
    """The request is invalid: a status from 400 to 499."""


def _build_unreachable_error(url: str, said: str, has_key: bool) -> ConfigError:
    sent = "rejected the key" if has_key else "requires a key, but none is set"
    return ConfigError(
        f"the server at {url} {sent} (status 401: {said}). Put the key into a file and set its path as "
        "generator.remote_inference_engine_api_key_file, or set SKYRL_ENGINE_API_KEY"
    )


def normalize_server_url(url: str) -> str:
    """Convert `host:port` or a URL to a URL without a trailing slash.

    Raises:
        ConfigError: neither of both.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(full)
    except httpx.InvalidURL:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"generator.remote_inference_engine_urls must contain host:port or http(s) addresses; got {url!r}"
        )
    return full.rstrip("/")


class ServerConnection:
    """Connection to one server.

    Args:
        url: `host:port` or a URL
        timeout_seconds: default deadline of a call
        timeout_setting: name of its setting, for errors
        api_key: sent with every request
    """

    def __init__(
        self,
        url: str,
        timeout_seconds: float,
        timeout_setting: str = "generator.engine_control_timeout_seconds",
        api_key: SecretStr | None = None,
    ):
        self.url = normalize_server_url(url)
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._timeout_setting = timeout_setting
        self._shut = False
        self._calls: set[asyncio.Future[httpx.Response]] = set()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def get(self, path: str, *, timeout_seconds: float | None = None, **params: object) -> Any:
        return await self._call("GET", path, None, params, timeout_seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, object] | None = None,
        timeout_seconds: float | None = None,
        timeout_setting: str | None = None,
    ) -> Any:
        """Send a POST request. Returns the parsed JSON of the response, or its text.

        Raises:
            ServerError: the server returned an error status (`ServerRefused`: below 500).
            WorkerError: unreachable, disconnected during the request, or timed out.
        """
        return await self._call("POST", path, body or {}, params or {}, timeout_seconds, timeout_setting)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        params: Mapping[str, object],
        timeout_seconds: float | None,
        timeout_setting: str | None = None,
    ) -> object:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            with waiting(f"the reply to {method} {path}", on=self.url, deadline=seconds):
                async with asyncio.timeout(seconds):
                    response = await self._send(method, path, body, params)
        except TimeoutError:
            late = (
                f"the server at {self.url} did not answer {method} {path} within {seconds:g} s "
                f"({timeout_setting or self._timeout_setting})"
            )
            raise WorkerError(late + await asyncio.to_thread(write_explanation, late)) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise WorkerError(
                f"the server at {self.url} cannot be reached ({error or type(error).__name__}): check that it is "
                "running and that generator.remote_inference_engine_urls is correct"
            ) from None
        except httpx.TransportError as error:
            raise WorkerError(
                f"the server at {self.url} ended the connection during {method} {path} "
                f"({error or type(error).__name__}): it may have crashed"
            ) from None
        if response.status_code == 401:
            raise _build_unreachable_error(self.url, _extract_error_text(response), self._api_key is not None)
        if response.status_code >= 400:
            kind = ServerRefused if response.status_code < 500 else ServerError
            raise kind(self.url, path, response.status_code, _extract_error_text(response))
        try:
            return response.json()
        except ValueError:
            return response.text

    async def _send(
        self, method: str, path: str, body: Mapping[str, object] | None, params: Mapping[str, Any]
    ) -> httpx.Response:
        """Send a request that `shut` can cancel."""
        closed = WorkerError(f"the connection to the server at {self.url} is closed")
        if self._shut:
            raise closed
        call = asyncio.ensure_future(self._get_client().request(method, self.url + path, json=body, params=params))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self._shut and call.cancelled():
                raise closed from None
            raise
        finally:
            self._calls.discard(call)

    def _get_client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._clients[loop] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(retries=1, limits=limits),  # retries connecting only
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                headers=self._build_key_header(),
            )
        return self._clients[loop]

    def _build_key_header(self) -> dict[str, str]:
        return {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key.get_secret_value()}"}

    async def check_key_required(self, path: str) -> bool:
        """Return whether `path` rejects a request without a key."""
        async with httpx.AsyncClient(timeout=_CONNECT_SECONDS) as stranger:
            with suppress(httpx.TransportError):
                return (await stranger.get(self.url + path)).status_code in (401, 403)
        return True

    async def shut(self) -> None:
        """Cancel all calls in flight, and reject later ones."""
        self._shut = True
        for call in self._calls:
            call.cancel()
        await self.close()

    async def close(self) -> None:
        """Close the client of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def _extract_error_text(response: httpx.Response) -> str:
    """Extract the error text of a server in any of the usual formats."""
    try:
        said = response.json()
    except ValueError:
        return response.text[:_MOST_TEXT_SHOWN]
    for key in ("error", "detail", "message"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return str(said)[:_MOST_TEXT_SHOWN]


def run_to_end(call: Coroutine[None, None, T]) -> T:
    """Run a coroutine from synchronous code, also if an event loop is already running."""
    with ThreadPoolExecutor(1, thread_name_prefix="remote-engine") as thread:
        return thread.submit(asyncio.run, call).result()
