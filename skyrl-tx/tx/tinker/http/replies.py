"""Responses: JSON, problems as `{"detail": text}`, and the refusal of bodies that are too large."""

import asyncio
import math

import orjson
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tx.errors import Busy

DRAIN_SECONDS = 30.0


def to_json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode a dict or a pydantic object as a JSON response."""
    body = value.model_dump_json().encode() if isinstance(value, BaseModel) else orjson.dumps(value)
    return Response(body, status, headers, media_type="application/json")


def build_problem(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """Build an error response; clients print its text verbatim."""
    return to_json_response({"detail": text}, status, headers)


def busy(error: Busy) -> Response:
    """Build a 429 response, which clients retry."""
    return build_problem(429, str(error), retry_after(error.retry_after_seconds))


def retry_after(seconds: float) -> dict[str, str]:
    """Build retry headers. `Retry-After` allows whole seconds only; the SDK reads the other header first."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, round(seconds * 1000)))}


class TooLarge(Response):
    """413 response to a client that may still be sending. The rest of the body is discarded for a limited time, since
    clients that read the response after sending would otherwise see a broken connection.
    """

    def __init__(self, text: str):
        super().__init__(orjson.dumps({"detail": text}), 413, {"Connection": "close"}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if (b"expect", b"100-continue") not in scope["headers"]:
            await _read_rest(receive)
        await send({"type": "http.response.body", "body": b""})


async def _read_rest(receive: Receive) -> None:
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            more = True
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        pass
