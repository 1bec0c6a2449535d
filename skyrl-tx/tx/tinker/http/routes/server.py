"""Endpoints about the server: health, capabilities, metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.client_flags import get_client_flags, get_dynamic_flags
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant, is_admin
from tx.tinker.wire import schemas

router = APIRouter(tags=["server"])
pages = APIRouter(tags=["pages"])

MAX_TELEMETRY_BYTES = 4 * 2**20
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "In the Prometheus text format"}


@pages.get("/healthz", **describe_route(responses.Health))
@router.get("/healthz", **describe_route(responses.Health))
async def healthz() -> Response:
    """Report that the server is up."""
    return to_json_response({"status": "ok"})


@router.get("/get_server_capabilities", **describe_route(responses.Capabilities))
async def get_server_capabilities(request: Request) -> Response:
    """List the served models."""
    return to_json_response(get_service(request).capabilities())


@router.post("/client/config", **describe_route(responses.Flags, schemas.ClientConfigRequest))
async def client_config(request: Request) -> Response:
    await read_json(request, schemas.ClientConfigRequest)
    return to_json_response(get_client_flags(request.app.state.config))


@router.post("/client/dynamic_config", **describe_route(responses.Flags, schemas.ClientConfigRequest))
async def client_dynamic_config(request: Request) -> Response:
    await read_json(request, schemas.ClientConfigRequest)
    return to_json_response(get_dynamic_flags())


@router.post("/telemetry", **describe_route(responses.TelemetryTaken, schemas.TelemetryRequest))
async def telemetry(request: Request) -> Response:
    """Accept and discard telemetry: nothing leaves this machine."""
    await read_json(request, schemas.TelemetryRequest, MAX_TELEMETRY_BYTES)
    return to_json_response({"status": "accepted"})


@pages.get("/metrics", responses={200: _TEXT}, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Everybody's numbers for an admin's key, a tenant's own for another."""
    numbers = request.app.state.metrics
    text = numbers.render() if is_admin(request) else numbers.render_for_tenant(get_tenant(request))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
