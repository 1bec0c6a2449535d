"""The addresses of a runtime server (`runtimes.wire` lists them): bytes to wishes, answers to bytes."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.wire import (
    ID,
    POLL_SECONDS,
    CommandState,
    ErrorKind,
    ErrorReply,
    NewCommand,
    NewRuntime,
    RuntimeState,
)
from skyrl_agent.services.hosting import Full, Gone, Host, HostSettings
from skyrl_agent.types import JsonObject
from skyrl_gym.services import LOOPBACK_NAMES, is_loopback

Id = Annotated[str, Path(pattern=ID)]
Wait = Annotated[float, Query(ge=0, le=POLL_SECONDS)]
Wishes = TypeVar("Wishes", bound=BaseModel)


class Refused(Exception):
    """Refusal of a request with an HTTP status."""

    def __init__(self, status: int, kind: ErrorKind, message: str) -> None:
        self.status, self.reply = status, ErrorReply(kind=kind, message=message)


def create_app(settings: HostSettings, token: str | None = None) -> FastAPI:
    """
    Args:
        token: what a client must show. None: any on this machine is let in, but for pages that a browser shows.
    """
    host = Host(settings)

    @contextlib.asynccontextmanager
    async def keeping(_: FastAPI) -> AsyncIterator[None]:
        keeper = asyncio.create_task(host.keep())
        yield
        keeper.cancel()
        await host.close_all()

    async def admit(request: Request) -> None:
        if token is None:
            if not is_loopback(request.url.hostname):  # DNS rebinding by a foreign page
                raise Refused(403, "unauthorized", f"this server has no token and accepts only {LOOPBACK_NAMES}")
        elif not secrets.compare_digest(
            request.headers.get("authorization", "").encode("latin-1"), f"Bearer {token}".encode()
        ):
            raise Refused(401, "unauthorized", "the bearer token is missing or wrong")

    app = FastAPI(lifespan=keeping, dependencies=[Depends(admit)], openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(InfraError, _build_error_handler(500, "infrastructure"))
    app.add_exception_handler(ValueError, _build_error_handler(422, "value"))
    app.add_exception_handler(FileNotFoundError, _build_error_handler(404, "missing_file"))
    app.add_exception_handler(Full, _build_error_handler(503, "full"))
    app.add_exception_handler(Gone, _build_error_handler(410, "gone"))
    app.add_exception_handler(RequestValidationError, _build_error_handler(400, "request"))
    app.add_exception_handler(Refused, _build_error_response)

    async def body(request: Request) -> bytes:
        """Read the request body. Raises Refused before a body above the limit is read completely."""
        rule = f"a request may have at most {settings.max_body_bytes} bytes"
        if int(request.headers.get("content-length", 0)) > settings.max_body_bytes:
            raise Refused(413, "request", rule)
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > settings.max_body_bytes:
                raise Refused(413, "request", rule)
        return bytes(content)

    async def wishes(kind: type[Wishes], request: Request) -> Wishes:
        try:
            return kind.model_validate_json(await body(request))
        except ValidationError as error:
            raise Refused(400, "request", str(error)) from None

    @app.get("/health")
    async def health() -> JsonObject:
        return {"runtimes": host.num_runtimes, "max_runtimes": settings.max_runtimes, "kind": settings.kind}

    async def runtime_state(id: str, wait: float) -> RuntimeState:
        starting = host.find(id).starting
        await asyncio.wait([starting], timeout=wait)
        if not starting.done():
            return RuntimeState(ready=False)
        runtime = host.ready(id)
        return RuntimeState(ready=True, workdir=runtime.workdir, python=runtime.python)

    @app.put("/runtimes/{id}")
    async def make(id: Id, request: Request, wait: Wait = 0.0) -> RuntimeState:
        host.make(id, await wishes(NewRuntime, request))
        return await runtime_state(id, wait)

    @app.get("/runtimes/{id}")
    async def state(id: Id, wait: Wait = 0.0) -> RuntimeState:
        return await runtime_state(id, wait)

    @app.post("/runtimes/{id}/lease")
    async def renew(id: Id) -> Response:
        host.find(id)
        return Response(status_code=204)

    @app.delete("/runtimes/{id}")
    async def close(id: Id) -> Response:
        await host.close(id)
        return Response(status_code=204)

    async def command_state(id: str, command_id: str, wait: float) -> CommandState:
        running = host.command(id, command_id)
        await asyncio.wait([running], timeout=wait)
        if running.cancelled():
            raise InfraError("the command was cancelled")
        return CommandState(result=running.result() if running.done() else None)

    @app.put("/runtimes/{id}/commands/{command_id}")
    async def run(id: Id, command_id: Id, request: Request, wait: Wait = 0.0) -> CommandState:
        host.run(id, command_id, await wishes(NewCommand, request))
        return await command_state(id, command_id, wait)

    @app.get("/runtimes/{id}/commands/{command_id}")
    async def result(id: Id, command_id: Id, wait: Wait = 0.0) -> CommandState:
        return await command_state(id, command_id, wait)

    @app.delete("/runtimes/{id}/commands/{command_id}")
    async def cancel(id: Id, command_id: Id) -> Response:
        await host.cancel(id, command_id)
        return Response(status_code=204)

    @app.put("/runtimes/{id}/files")
    async def write(id: Id, path: str, request: Request) -> Response:
        await host.ready(id).write(path, await body(request))
        return Response(status_code=204)

    @app.get("/runtimes/{id}/files")
    async def read(id: Id, path: str) -> Response:
        return Response(await host.ready(id).read(path), media_type="application/octet-stream")

    @app.get("/runtimes/{id}/snapshot")
    async def snapshot(id: Id) -> Response:
        taken = await host.ready(id).snapshot()
        assert isinstance(taken.value, bytes)
        return Response(taken.value, media_type="application/gzip")

    return app


def _build_error_handler(status: int, kind: ErrorKind) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(_: Request, error: Exception) -> Response:
        return JSONResponse(ErrorReply(kind=kind, message=str(error)).model_dump(), status_code=status)

    return answer


async def _build_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.reply.model_dump(), status_code=error.status)
