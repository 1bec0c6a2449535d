"""Request bodies: read within limits and parsed as the schema of their endpoint.

Large ones are parsed in a thread, so that heartbeats of others need not wait.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.errors import Busy, RequestError
from tx.tinker.http.replies import busy
from tx.tinker.http.scope import TENANT, get_service, get_tenant
from tx.tinker.wire.schemas import to_request_error
from tx.tinker.wire.training_requests import find_address

Schema = TypeVar("Schema", bound=BaseModel)
Result = TypeVar("Result")

THREAD_FROM_BYTES = 64 * 1024
"""Parsing so much takes about a millisecond; a smaller body is sooner parsed than handed to a thread."""
BODY_SECONDS = 120.0
"""Time in which the whole body must arrive."""
IDLE_SECONDS = 30.0
"""Longest time between two parts of a body."""
SMALL_BYTES = 64 * 1024
"""A body up to this is taken in however much others send: heartbeats, polls, steps."""
CONTROL_PATHS = frozenset({"/healthz", "/api/v1/healthz", "/api/v1/session_heartbeat"})
"""Taken in however many requests are under way."""
FULL = 0.75
"""Share of the requests under way from which on a tenant has no more than an equal share."""
RETRY_SECONDS = 1.0
_SHARE = "tx.share"


class BodyTooLarge(RequestError):
    """The body exceeds the server's limit; the rest was not read."""

    def __init__(self, max_bytes: int):
        super().__init__(
            f"body is larger than {max_bytes:,} bytes (--max-body-mb); send less data per request. A seq_id in it was "
            "not read, so later requests of the same model wait for it, up to --seq-gap-timeout-sec",
            413,
        )


class Intake:
    """Counts of requests being received, by tenant: requests from their headers to their response, and the bytes of
    their bodies that have arrived.

    Args:
        max_bytes: of all bodies. A tenant may hold as many as are still free, so a single tenant gets at most half and
            others always have room; a lone body is admitted whatever its size
        max_requests: of all tenants together
    """

    def __init__(self, max_bytes: int, max_requests: int):
        self.max_bytes, self.max_requests = max_bytes, max_requests
        self.num_bytes: Counter[str] = Counter()
        self.num_requests: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.parsing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def metrics(self) -> dict[str, dict[str, int]]:
        return {
            "requests_under_way": dict(self.num_requests),
            "body_bytes_under_way": dict(self.num_bytes),
            "refused_at_intake_total": dict(self.refusals),
        }

    def refuse(self, tenant: str, why: str) -> NoReturn:
        self.refusals[tenant] += 1
        raise Busy(why, RETRY_SECONDS)

    def begin(self, tenant: str, path: str) -> "BodyReservation":
        """Count a request. Raises Busy if the tenant's requests would leave too little room for other tenants."""
        # No await between check and count, here and in `hold`: two requests of the loop cannot both get the last place.
        room, total = FULL * self.max_requests, self.num_requests.total()
        share = room / len(self.num_requests.keys() | {tenant})
        if path not in CONTROL_PATHS and total >= room and self.num_requests[tenant] >= share:
            own = self.num_requests[tenant]
            self.refuse(
                tenant, f"{own} requests of this tenant are in flight, {total} in total; wait until some are complete"
            )
        _add(self.num_requests, tenant, 1)
        return BodyReservation(self, tenant)


class BodyReservation:
    """One request's part of it."""

    def __init__(self, intake: Intake, tenant: str):
        self.intake, self.tenant, self.num_bytes = intake, tenant, 0

    def check(self, num_bytes: int) -> None:
        """Raise Busy if these bytes do not fit now."""
        intake, more = self.intake, num_bytes - self.num_bytes
        total, own = intake.num_bytes.total() + more, intake.num_bytes[self.tenant] + more
        # `total > num_bytes`: a body that would be alone is let in, or one above half of the limit could never be sent.
        if num_bytes > SMALL_BYTES and total > num_bytes and own > intake.max_bytes - total:
            intake.refuse(
                self.tenant,
                f"requests of {total - more:,} bytes are being received, {own - more:,} of them from this tenant, "
                "which may use at most as much as is still free (--max-bodies-mb); retry later",
            )

    def hold(self, num_bytes: int) -> None:
        """Reserve received bytes. Raises Busy if they do not fit."""
        self.check(num_bytes)
        _add(self.intake.num_bytes, self.tenant, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def end(self) -> None:
        _add(self.intake.num_bytes, self.tenant, -self.num_bytes)
        _add(self.intake.num_requests, self.tenant, -1)


def _add(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] += number
    if not counts[tenant]:
        del counts[tenant]


class Counted:
    """ASGI middleware that counts every request. Runs inside the authentication, which determines the tenant."""

    def __init__(self, app: ASGIApp, intake: Intake):
        self.app, self.intake = app, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope[TENANT]
        try:
            share = scope[_SHARE] = self.intake.begin(tenant or "", scope["path"])
        except Busy as error:
            if tenant:
                # The client is alive, but its session id is in the unread body.
                scope["app"].state.service.sessions.keep_all(tenant)
            return await busy(error)(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            share.end()


def max_body_bytes(request: Request) -> int:
    return request.app.state.config.max_body_mb * 2**20


async def read_body(request: Request, max_bytes: int | None = None) -> bytes:
    """Read the raw body.

    Args:
        max_bytes: default: the server's limit

    Raises:
        BodyTooLarge: by its declared length (before reading), or by the received bytes.
        RequestError: the body timed out.
        Busy: the tenant is sending too much, given the load of others.
    """
    max_bytes = max_bytes or max_body_bytes(request)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
    share: BodyReservation = request.scope[_SHARE]
    # Only checked, to refuse early. Counting announced bytes would let a client take room without sending anything.
    share.check(int(announced) if announced.isdecimal() else 0)
    clock = asyncio.get_running_loop().time
    pieces: list[bytes] = []
    size = 0
    try:
        # Each piece renews one limit; the other ends clients that send a byte now and then.
        async with asyncio.timeout(BODY_SECONDS), asyncio.timeout(IDLE_SECONDS) as idle:
            async for piece in request.stream():
                idle.reschedule(clock() + IDLE_SECONDS)
                size += len(piece)
                if size > max_bytes:
                    raise BodyTooLarge(max_bytes)
                # At each piece: bodies that are all still incomplete must not exceed the memory limit together.
                share.hold(size)
                pieces.append(piece)
    except TimeoutError:
        late = f"no data for {IDLE_SECONDS:.0f} s" if idle.expired() else f"not within {BODY_SECONDS:.0f} s"
        raise RequestError(f"the request body did not arrive: {late}", 408) from None
    except ClientDisconnect:
        raise RequestError("the client disconnected while sending", 400) from None
    return b"".join(pieces)


async def run_in_thread_if_large(request: Request, size: int, parse: Callable[[], Result]) -> Result:
    """Return what `parse` does. Of a tenant only one large body is parsed at a time: threads, and turns of the
    interpreter, are left for the others."""
    if size < THREAD_FROM_BYTES:
        return parse()
    share: BodyReservation = request.scope[_SHARE]
    async with share.intake.parsing[share.tenant]:
        return await asyncio.to_thread(parse)


async def read_json(request: Request, schema: type[Schema], max_bytes: int | None = None) -> Schema:
    """Read the body as an object of the schema.

    Raises:
        RequestError: invalid JSON (400), or schema violation (422, naming field, value and rule).
    """
    check_content_type(request, "application/json")
    body = await read_body(request, max_bytes)
    return await run_in_thread_if_large(request, len(body), lambda: parse_json(body, schema))


async def read_json_in_order(request: Request, schema: type[Schema]) -> Schema:
    """Read a body as `read_json` does, and record a refusal's seq as used up: clients never reuse a seq, so the model
    would wait for it for ever."""
    check_content_type(request, "application/json")
    body = await read_body(request)
    try:
        return await run_in_thread_if_large(request, len(body), lambda: parse_json(body, schema))
    except RequestError as error:
        await record_refusal(request, body, error)
        raise


async def record_refusal(request: Request, body: bytes, error: RequestError) -> None:
    """Record the refusal of a body if its model and seq are readable."""
    headers = request.headers
    content_type, encoding = headers.get("content-type", ""), headers.get("content-encoding")
    max_bytes = max_body_bytes(request)
    address = await run_in_thread_if_large(
        request, len(body), lambda: find_address(body, content_type, encoding, max_bytes)
    )
    if address is not None:
        await get_service(request).intake.refuse(get_tenant(request), address.model_id, address.seq, str(error))


def parse_json(body: bytes, schema: type[Schema]) -> Schema:
    """Parse a body as JSON of the schema. Raises: see `read_json`."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(f"body must be JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        raise to_request_error(error) from None


def check_content_type(request: Request, *allowed: str) -> str:
    """Return the content type of the request, without parameters. The accepted types trigger a CORS preflight, so pages
    of other sites cannot use a server on loopback.

    Raises:
        RequestError: an unsupported content type.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in allowed:
        raise RequestError(f"Content-Type must be {' or '.join(allowed)}; got {content_type or 'none'!r}", 415)
    return content_type
