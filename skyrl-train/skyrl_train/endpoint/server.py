"""The endpoint as an HTTP server in the caller's event loop: OpenAI's chat, completions and responses, and Anthropic's
messages. Handles routes, connections and keys; frontends interpret requests."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from loguru import logger
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from skyrl_train.endpoint.anthropic_api import errors as anthropic_errors
from skyrl_train.endpoint.anthropic_api.frontend import AnthropicFrontend
from skyrl_train.endpoint.errors import ApiError, build_internal_error, build_refusal
from skyrl_train.endpoint.keys import EndpointKeys, SessionUrls, build_session_path, parse_session_from_url
from skyrl_train.endpoint.openai_api.answer_parts import generate_id
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend, Payload
from skyrl_train.endpoint.openai_api.responses import ResponsesFrontend
from skyrl_train.endpoint.openai_api.sessions import find_connection_session
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 64 * 1024 * 1024
_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 600
"""Agents are idle for minutes while a tool runs; a connection closed meanwhile costs a retry."""
_CLIENT_WENT_AWAY = 499
_RETRY_SECONDS = "1"


def create_app(frontend: OpenAIFrontend, keys: EndpointKeys, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """Build the ASGI application with the API's routes."""
    anthropic, responses = AnthropicFrontend(frontend), ResponsesFrontend(frontend)
    generating: dict[str, Callable[[bytes, str | None], Awaitable[Any]]] = {
        "/v1/chat/completions": frontend.chat,
        "/v1/completions": frontend.completion,
        "/v1/responses": responses.create,
        "/v1/messages": anthropic.messages,
    }
    converting: dict[str, Callable[[bytes], Awaitable[Payload]]] = {
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/tokenize": frontend.tokenize,
        "/detokenize": frontend.detokenize,
    }

    def route(method: str, path: str, handler: Handler) -> Route:
        async def answer(request: Request) -> Response:
            try:
                request.state.session = _get_session(request, keys)
                return await handler(request)
            except Exception as error:  # any error is returned as JSON
                return _build_error_response(request, build_internal_error(error))

        return Route(path, answer, methods=[method])

    def generated(generate: Callable[[bytes, str | None], Awaitable[Any]]) -> Handler:
        async def handler(request: Request) -> Response:
            body = await _read_body(request, max_body_bytes)
            return await _run_while_connected(request, _build_response(generate(body, request.state.session)))

        return handler

    def converted(convert: Callable[[bytes], Awaitable[Payload]]) -> Handler:
        async def handler(request: Request) -> Response:
            return JSONResponse(await convert(await _read_body(request, max_body_bytes)))

        return handler

    async def create_response(request: Request) -> Response:
        act = responses.delete if request.method == "DELETE" else responses.retrieve
        return JSONResponse(act(request.path_params["name"], request.state.session))

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        return JSONResponse(await (frontend.models() if name is None else frontend.model(name)))

    return Starlette(
        routes=[
            *(route("POST", path, generated(generate)) for path, generate in generating.items()),
            *(route("POST", path, converted(convert)) for path, convert in converting.items()),
            *(route(method, "/v1/responses/{name}", create_response) for method in ("GET", "DELETE")),
            *(route("GET", path, models) for path in ("/v1/models", "/v1/models/{name:path}")),
            _build_health_route(frontend),
        ],
        exception_handlers={HTTPException: _handle_unknown_route},
    )


def _build_health_route(frontend: OpenAIFrontend) -> Route:
    """Build the health route, which needs no key: for process supervisors."""

    async def health(request: Request) -> Response:
        try:
            await frontend.check_health()
        except ApiError as error:
            return _build_error_response(request, error)
        return JSONResponse({"status": "healthy"})

    return Route("/health", health, methods=["GET"])


async def _handle_unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}{_suggest_path(request.url.path)}"
    return _build_error_response(request, ApiError(error.status_code, message, code="unknown_route"))


class EndpointServer:
    """HTTP server of the endpoint. `start`, `stop` and all requests run in one event loop.

    Args:
        client: one engine, or a client over many.
        model_name: one or several names of the model for clients.
        host, port: port 0 is any free one, see `url`.
        api_key: key that clients must send, or a session's key (`session_key`); None: open to everyone who reaches the
            server.
        frontend_settings: further keywords of `OpenAIFrontend`.
    """

    def __init__(
        self,
        client: InferenceEngineInterface,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str | list[str],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str | None = None,
        **frontend_settings: Any,
    ):
        self.frontend = OpenAIFrontend(client, tokenizer, model_name, **frontend_settings)
        self._keys = EndpointKeys(api_key)
        self._app = SessionUrls(create_app(self.frontend, self._keys))
        self._host = host
        self._port = port
        self._has_key = api_key is not None
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL for clients, set by `start`."""
        assert self._socket is not None, "call start() first"
        host, port = self._socket.getsockname()[:2]
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or str(host)
        return f"http://[{reachable}]:{port}/v1" if ":" in reachable else f"http://{reachable}:{port}/v1"

    def session_url(self, session: str) -> str:
        """Return the base URL of a session for OpenAI's clients; Anthropic's need it without `/v1`."""
        return self.url.removesuffix("/v1") + build_session_path(session) + "/v1"

    def session_key(self, session: str) -> str:
        """Return the key of a session."""
        return self._keys.of_session(session)

    async def start(self) -> None:
        """Start listening, and return when the server is ready.

        Raises:
            ConfigError: the port is in use, or the address is not local.
        """
        if self._task is not None:
            raise RuntimeError("the endpoint is already running")
        self._socket = _open_socket(self._host, self._port)
        if not self._has_key and not _is_loopback(self._socket):
            logger.warning(
                f"the endpoint listens on {self._host} without a key: anyone who can reach this address can use the "
                "engines and read their completions. Use generator.http_endpoint_host=127.0.0.1, or set a key."
            )
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_GRACE_SECONDS),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while not self._server.started:
            if self._task.done() or asyncio.get_running_loop().time() > deadline:
                await self.stop()
                raise WorkerError(f"the endpoint did not start within {_START_SECONDS:g} seconds")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Reject new requests, let running ones finish for some seconds, and close. No effect if not running."""
        server, task, sock = self._server, self._task, self._socket
        self._server = self._task = None
        if server is not None and task is not None:
            server.should_exit = True
            done, _ = await asyncio.wait({task}, timeout=2 * _GRACE_SECONDS)
            if not done:
                server.force_exit = True
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_SECONDS)
        if sock is not None:
            sock.close()


class _Server(uvicorn.Server):
    """Uvicorn server that does not replace the process's signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_address(host: str, port: int) -> None:
    """Check that the endpoint can listen on this address, before slower components start. Raises ConfigError like
    `start`.
    """
    _open_socket(host, port).close()


def _open_socket(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        # With the protocol named: asyncio switches Nagle's algorithm off only then, and a used connection is fast.
        sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"generator.http_endpoint_host={host!r} is not a valid address: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"generator.http_endpoint_port={port} is in use on {host}; stop the process that listens there, or "
                "set another port (0: any free one)"
            ) from error
        raise ConfigError(
            f"the endpoint cannot listen on generator.http_endpoint_host={host!r}, "
            f"generator.http_endpoint_port={port}: {error}"
        ) from error
    return sock


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def _get_session(request: Request, keys: EndpointKeys) -> str | None:
    """Return the session of a request by key, URL or header. Raises ApiError if the key is wrong."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    if (key := request.headers.get("x-api-key")) is not None:  # Anthropic's clients
        given.append(key.strip())
    return find_connection_session(
        keys.find_session(given), parse_session_from_url(request.scope), request.headers.get(SESSION_HEADER) or None
    )


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the request's body up to the size limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
        parts.append(part)
    if not size:
        raise build_refusal("the body is empty; it must be a JSON object")
    return b"".join(parts)


async def _build_response(answer: Awaitable[Payload | AsyncIterator[str]]) -> Response:
    """Build the HTTP response. A stream waits for its first event, so that an earlier error can set the status."""
    result = await answer
    if isinstance(result, dict):
        return JSONResponse(result)
    first = await anext(result)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_chain_first(first, result), media_type="text/event-stream", headers=headers)


async def _chain_first(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _run_while_connected(request: Request, answer: Coroutine[None, None, Response]) -> Response:
    """Await the result, and cancel it if the client disconnects (engines then abort the request)."""
    work, gone = asyncio.create_task(answer), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=_CLIENT_WENT_AWAY)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _suggest_path(path: str) -> str:
    """Return a hint if a client's base URL has one `/v1` too many or too few, else an empty text."""
    if path.startswith("/s//"):
        return "; the URL names no session: it must be /s/NAME/v1 (EndpointServer.session_url)"
    if path.startswith("/v1/v1/"):
        return "; the client appends /v1: remove it from its base URL"
    if path in ("/chat/completions", "/completions", "/responses", "/models"):
        return "; the client's base URL must end in /v1"
    return ""


def _build_error_response(request: Request, error: ApiError) -> Response:
    """Build an error response in the client's protocol."""
    is_anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    status = anthropic_errors.get_status(error) if is_anthropic else error.status
    headers = {"Retry-After": _RETRY_SECONDS} if error.status == 429 else {}
    if not is_anthropic:
        return JSONResponse(error.body(), status, headers)
    request_id = generate_id("req")
    return JSONResponse(
        anthropic_errors.build_error_body(error, request_id), status, headers | {"request-id": request_id}
    )
