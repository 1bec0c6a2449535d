"""The endpoint as an HTTP server in the caller's event loop: OpenAI's chat, completions and responses, and Anthropic's
messages. Knows routes, connections and keys; what requests mean is the frontends'."""

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
from skyrl_train.endpoint.errors import ApiError, error_of_ours, refused
from skyrl_train.endpoint.keys import EndpointKeys, SessionUrls, session_of_url, session_path
from skyrl_train.endpoint.openai_api.answer_parts import new_id
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend, Payload
from skyrl_train.endpoint.openai_api.responses import ResponsesFrontend
from skyrl_train.endpoint.openai_api.sessions import session_of_connection
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

SESSION_HEADER = "X-Session-ID"
MAX_BODY_BYTES = 64 * 1024 * 1024
_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 600
"""Agents are silent for minutes while a tool runs; a connection that ends meanwhile costs them a retry."""
_CLIENT_WENT_AWAY = 499
_RETRY_SECONDS = "1"


def create_app(frontend: OpenAIFrontend, keys: EndpointKeys, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The routes of the API."""
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
                request.state.session = _session(request, keys)
                return await handler(request)
            except Exception as error:  # a client gets an error as JSON, whatever it is
                return _error_response(request, error_of_ours(error))

        return Route(path, answer, methods=[method])

    def generated(generate: Callable[[bytes, str | None], Awaitable[Any]]) -> Handler:
        async def handler(request: Request) -> Response:
            body = await _body(request, max_body_bytes)
            return await _while_connected(request, _generated(generate(body, request.state.session)))

        return handler

    def converted(convert: Callable[[bytes], Awaitable[Payload]]) -> Handler:
        async def handler(request: Request) -> Response:
            return JSONResponse(await convert(await _body(request, max_body_bytes)))

        return handler

    async def response(request: Request) -> Response:
        act = responses.delete if request.method == "DELETE" else responses.retrieve
        return JSONResponse(act(request.path_params["name"], request.state.session))

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        return JSONResponse(await (frontend.models() if name is None else frontend.model(name)))

    return Starlette(
        routes=[
            *(route("POST", path, generated(generate)) for path, generate in generating.items()),
            *(route("POST", path, converted(convert)) for path, convert in converting.items()),
            *(route(method, "/v1/responses/{name}", response) for method in ("GET", "DELETE")),
            *(route("GET", path, models) for path in ("/v1/models", "/v1/models/{name:path}")),
            _health_route(frontend),
        ],
        exception_handlers={HTTPException: _unknown_route},
    )


def _health_route(frontend: OpenAIFrontend) -> Route:
    """Return the route that needs no key: for whoever watches over processes."""

    async def health(request: Request) -> Response:
        try:
            await frontend.check_health()
        except ApiError as error:
            return _error_response(request, error)
        return JSONResponse({"status": "healthy"})

    return Route("/health", health, methods=["GET"])


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}{_hint_for_path(request.url.path)}"
    return _error_response(request, ApiError(error.status_code, message, code="unknown_route"))


class EndpointServer:
    """The endpoint, listening. `start` and `stop` belong to one event loop, in which it answers.

    Args:
        client: one engine, or a client over many.
        model_name: what clients call the model: one name, or several.
        host, port: port 0 is any free one, see `url`.
        api_key: what clients must send as their key, unless they have a session's (`session_key`); None: anyone who
            reaches the server may use it.
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
        """Base URL for clients. Known after the start."""
        assert self._socket is not None, "start() comes first"
        host, port = self._socket.getsockname()[:2]
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or str(host)
        return f"http://[{reachable}]:{port}/v1" if ":" in reachable else f"http://{reachable}:{port}/v1"

    def session_url(self, session: str) -> str:
        """Base URL whose requests belong to a session, for OpenAI's clients; Anthropic's want it without the `/v1`."""
        return self.url.removesuffix("/v1") + session_path(session) + "/v1"

    def session_key(self, session: str) -> str:
        """Key whose requests belong to a session, and to no other."""
        return self._keys.of_session(session)

    async def start(self) -> None:
        """Listen, and return when requests are answered.

        Raises:
            ConfigError: the port is taken, or this machine has no such address.
        """
        if self._task is not None:
            raise RuntimeError("the endpoint runs already")
        self._socket = _listening(self._host, self._port)
        if not self._has_key and not _is_loopback(self._socket):
            logger.warning(
                f"the endpoint listens on {self._host} without a key: whoever reaches that address can use the engines "
                "and read what they answer. Use generator.http_endpoint_host=127.0.0.1, or set a key."
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
        """Take no new requests, give those under way some seconds, and close. No effect if it does not run."""
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
    """Server that leaves the process's signal handlers to the program it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_address(host: str, port: int) -> None:
    """Check that the endpoint can listen here, before slower parts start. Raises ConfigError like `start`."""
    _listening(host, port).close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        # With the protocol named: asyncio switches Nagle's algorithm off only then, and a used connection is fast.
        sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"generator.http_endpoint_host={host!r} is no address: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"generator.http_endpoint_port={port} is taken on {host}; end what listens there, or give another port "
                "(0: any free one)"
            ) from error
        raise ConfigError(
            f"the endpoint cannot listen on generator.http_endpoint_host={host!r}, "
            f"generator.http_endpoint_port={port}: {error}"
        ) from error
    return sock


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def _session(request: Request, keys: EndpointKeys) -> str | None:
    """Return the session of a request, of its key, URL or header. Raises ApiError if it has not the right key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    if (key := request.headers.get("x-api-key")) is not None:  # Anthropic's clients
        given.append(key.strip())
    return session_of_connection(
        keys.session_of(given), session_of_url(request.scope), request.headers.get(SESSION_HEADER) or None
    )


async def _body(request: Request, max_bytes: int) -> bytes:
    """The request's body, read no further than it may be long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
        parts.append(part)
    if not size:
        raise refused("the body is empty; it must be a JSON object")
    return b"".join(parts)


async def _generated(answer: Awaitable[Payload | AsyncIterator[str]]) -> Response:
    """An answer as a response; of a stream only when its first event is there, so that an error before it has a
    status."""
    result = await answer
    if isinstance(result, dict):
        return JSONResponse(result)
    first = await anext(result)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_with_first(first, result), media_type="text/event-stream", headers=headers)


async def _with_first(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in rest:
        yield event


async def _while_connected(request: Request, answer: Coroutine[None, None, Response]) -> Response:
    """The answer; if the client goes away before, the work on it is cancelled (engines then abort the request)."""
    work, gone = asyncio.create_task(answer), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=_CLIENT_WENT_AWAY)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _hint_for_path(path: str) -> str:
    """Return what to change where a client's base URL has one `/v1` too many or too few; else nothing."""
    if path.startswith("/s//"):
        return "; the URL names no session: it must be /s/NAME/v1 (EndpointServer.session_url)"
    if path.startswith("/v1/v1/"):
        return "; the client adds /v1 by itself: leave it out of its base URL"
    if path in ("/chat/completions", "/completions", "/responses", "/models"):
        return "; the client's base URL must end in /v1"
    return ""


def _error_response(request: Request, error: ApiError) -> Response:
    """An error in the form of the API that the client speaks."""
    is_anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    status = anthropic_errors.status_of(error) if is_anthropic else error.status
    headers = {"Retry-After": _RETRY_SECONDS} if error.status == 429 else {}
    if not is_anthropic:
        return JSONResponse(error.body(), status, headers)
    request_id = new_id("req")
    return JSONResponse(anthropic_errors.error_body(error, request_id), status, headers | {"request-id": request_id})
