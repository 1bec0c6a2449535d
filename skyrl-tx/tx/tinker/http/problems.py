"""Exception handlers: responses name the remedy, and never cause a client to retry in a tight loop.

Unexpected errors are logged with an id that the response contains. Clients retry 5xx for five minutes with increasing
delays, except while polling for results, where they retry immediately; there the response is a 429, for which they
pause.
"""

import asyncio
import logging
import secrets
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tx.errors import Busy, RequestError
from tx.tinker.http.bodies import BodyTooLarge
from tx.tinker.http.replies import TooLarge, build_problem, busy, retry_after
from tx.tinker.http.scope import TENANT, get_service
from tx.tinker.wire.schemas import describe_errors

logger = logging.getLogger(__name__)

POLL_PATHS = ("/api/v1/retrieve_future", "/api/v1/retrieve_futures")
POLL_PAUSE_SECONDS = 5


def install(app: FastAPI) -> None:
    """Register the exception handlers of the app."""
    app.add_exception_handler(RequestError, _handle_refused)
    app.add_exception_handler(Busy, _handle_busy)
    app.add_exception_handler(RequestValidationError, _handle_wrong_parameters)
    app.add_exception_handler(HTTPException, _handle_framework_error)


class Unforeseen:
    """Outermost ASGI middleware that catches all exceptions, so that none reaches the web server."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watching(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watching)
        except asyncio.CancelledError:
            raise
        except Exception:  # outermost handler: logged with an id that the response carries
            name = secrets.token_hex(4)
            logger.exception("error %s at %s %s", name, scope["method"], scope["path"])
            if started:
                raise  # partially sent: only a broken connection signals the error to the client
            await _handle_unforeseen(name, scope["path"])(scope, receive, send)


def _handle_unforeseen(name: str, path: str) -> Response:
    text = f"error {name} in the server; its log has the details"
    if path in POLL_PATHS:
        return build_problem(429, f"{text}; the result is kept, retry", retry_after(POLL_PAUSE_SECONDS))
    return build_problem(500, text)


async def _handle_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if isinstance(error, BodyTooLarge):
        return TooLarge(str(error))
    return build_problem(error.status, str(error), {"Connection": "close"} if error.status == 408 else None)


async def _handle_busy(request: Request, error: Exception) -> Response:
    """Respond with 429. Even a refused request (or heartbeat) keeps its session alive."""
    assert isinstance(error, Busy)
    if tenant := request.scope[TENANT]:
        get_service(request).sessions.keep_all(tenant)
    return busy(error)


async def _handle_wrong_parameters(request: Request, error: Exception) -> Response:
    """Refuse wrong path or query parameters; bodies are read by `bodies`."""
    assert isinstance(error, RequestValidationError)
    return build_problem(422, describe_errors(_Parameters(error)))


class _Parameters:
    """Validation errors by parameter name, without the parameter's location."""

    def __init__(self, error: RequestValidationError):
        self._findings = [{**found, "loc": found["loc"][1:]} for found in error.errors()]

    def errors(self) -> list[dict[str, Any]]:
        return self._findings


async def _handle_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"no such endpoint: {request.method} {request.url.path}; see /openapi.json for all endpoints"
    if error.status_code == 405:
        text = f"{request.url.path} does not allow {request.method}"
        return build_problem(405, text, {"Allow": ", ".join(_list_methods(request))})
    return build_problem(error.status_code, text, dict(error.headers or {}))


def _list_methods(request: Request) -> list[str]:
    """List the methods of an address, which several routes may share."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})
