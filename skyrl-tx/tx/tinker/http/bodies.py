"""What comes in: bodies read within a limit, and read as the schema of their endpoint.

Large ones are parsed in a thread, so that heartbeats of others need not wait.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.errors import Busy, RequestError
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire.schemas import as_request_error
from tx.tinker.wire.training_requests import find_address

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

THREAD_FROM_BYTES = 64 * 1024
"""Parsing so much takes about a millisecond; a smaller body is sooner parsed than handed to a thread."""
BODY_SECONDS = 120.0
"""For all of a body to arrive."""
RETRY_SECONDS = 1.0
_SHARE = "tx.share"


class BodyTooLarge(RequestError):
    """The body goes over the server's limit; the rest of it was not read."""

    def __init__(self, max_bytes: int):
        super().__init__(
            f"body is larger than {max_bytes:,} bytes (--max-body-mb); send fewer data at a time. If it had a seq_id, "
            "that was not read: what the same model is asked next waits for it, up to --seq-gap-timeout-sec",
            413,
        )


class Intake:
    """Counts the bytes of bodies that are in memory, of all clients: from their first to their request's answer.

    Args:
        max_bytes: more are refused for a while; one body alone is always let in
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        share = scope[_SHARE] = Share(self)
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_bytes -= share.num_bytes


class Share:
    """One request's part of it."""

    def __init__(self, intake: Intake):
        self.intake, self.num_bytes = intake, 0

    def hold(self, num_bytes: int) -> None:
        """So many, from now on. Raises Busy if there is no room for them."""
        others = self.intake.num_bytes - self.num_bytes
        if others and others + num_bytes > self.intake.max_bytes:
            raise Busy(
                f"requests of {others:,} bytes are being read already (--max-bodies-mb); send this one again later",
                RETRY_SECONDS,
            )
        self.intake.num_bytes, self.num_bytes = others + num_bytes, num_bytes


def max_body_bytes(request: Request) -> int:
    return request.app.state.config.max_body_mb * 2**20


async def read_body(request: Request, max_bytes: int | None = None) -> bytes:
    """The body, as sent.

    Args:
        max_bytes: the server's limit if left out

    Raises:
        BodyTooLarge: by its own account (before anything is read), or by what arrives.
        RequestError: it does not arrive in time.
        Busy: all clients together send too much at the moment.
    """
    max_bytes = max_bytes or max_body_bytes(request)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
    share: Share = request.scope[_SHARE]
    share.hold(int(announced) if announced.isdecimal() else 0)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise BodyTooLarge(max_bytes)
                share.hold(max(size, share.num_bytes))
                pieces.append(piece)
    except TimeoutError:
        raise RequestError(f"the request's body did not arrive within {BODY_SECONDS:.0f} s", 408) from None
    except ClientDisconnect:
        raise RequestError("the client went away while it sent", 400) from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def in_thread_if_large(size: int, parse: Callable[[], Result]) -> Result:
    """What `parse` returns."""
    return parse() if size < THREAD_FROM_BYTES else await asyncio.to_thread(parse)


async def read_json(request: Request, schema: type[Schema], max_bytes: int | None = None) -> Schema:
    """The body as an object of the schema.

    Raises:
        RequestError: no JSON (400), or not of the schema (422, naming field, value and rule).
    """
    require_content_type(request, "application/json")
    body = await read_body(request, max_bytes)
    return await in_thread_if_large(len(body), lambda: parse_json(body, schema))


async def read_json_in_order(request: Request, schema: type[Schema]) -> Schema:
    """As `read_json`, for what has a place in a model's order: a refused body has used up its place, or the model would
    wait for it for ever (clients never use a number again)."""
    require_content_type(request, "application/json")
    body = await read_body(request)
    try:
        return await in_thread_if_large(len(body), lambda: parse_json(body, schema))
    except RequestError as error:
        await use_up_place(request, body, error)
        raise


async def use_up_place(request: Request, body: bytes, error: RequestError) -> None:
    """Tells the desk of a refused body whose model and seq can still be read."""
    headers = request.headers
    content_type, encoding = headers.get("content-type", ""), headers.get("content-encoding")
    address = find_address(body, content_type, encoding, max_body_bytes(request))
    if address is not None:
        await desk_of(request).refuse(tenant_of(request), address.model_id, address.seq, str(error))


def parse_json(body: bytes, schema: type[Schema]) -> Schema:
    """As `read_json`."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(f"body must be JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        raise as_request_error(error) from None


def require_content_type(request: Request, *allowed: str) -> str:
    """The content type of the request, without its parameters. A browser sends no other site's page these types without
    asking first, so such pages cannot use a server on loopback.

    Raises:
        RequestError: another one.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in allowed:
        raise RequestError(f"Content-Type must be {' or '.join(allowed)}; got {content_type or 'none'!r}", 415)
    return content_type
