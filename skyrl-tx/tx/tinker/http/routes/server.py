"""About the server itself: is it there, what can it do, how is it doing."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from tx import __version__
from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json
from tx.tinker.http.client_flags import client_flags, dynamic_flags
from tx.tinker.http.openapi import described
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, is_admin, tenant_of
from tx.tinker.http.status_page import status_page
from tx.tinker.wire import schemas

router = APIRouter(tags=["server"])
pages = APIRouter(tags=["pages"])

MAX_TELEMETRY_BYTES = 4 * 2**20
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "In Prometheus' text format"}


@pages.get("/healthz", **described(answers.Health))
@router.get("/healthz", **described(answers.Health))
async def healthz() -> Response:
    return as_json({"status": "ok"})


@router.get("/get_server_capabilities", **described(answers.Capabilities))
async def get_server_capabilities(request: Request) -> Response:
    return as_json(desk_of(request).capabilities())


@router.post("/client/config", **described(answers.Flags, schemas.ClientConfigRequest))
async def client_config(request: Request) -> Response:
    await read_json(request, schemas.ClientConfigRequest)
    return as_json(client_flags(request.app.state.config))


@router.post("/client/dynamic_config", **described(answers.Flags, schemas.ClientConfigRequest))
async def client_dynamic_config(request: Request) -> Response:
    await read_json(request, schemas.ClientConfigRequest)
    return as_json(dynamic_flags())


@router.post("/telemetry", **described(answers.TelemetryTaken, schemas.TelemetryRequest))
async def telemetry(request: Request) -> Response:
    """Taken and thrown away: nothing leaves this machine."""
    await read_json(request, schemas.TelemetryRequest, MAX_TELEMETRY_BYTES)
    return as_json({"status": "accepted"})


@pages.get("/metrics", responses={200: _TEXT}, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Everybody's numbers for an admin's key, a tenant's own for another."""
    numbers = request.app.state.metrics
    text = numbers.text() if is_admin(request) else numbers.text_for(tenant_of(request))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@pages.get("/status", response_class=HTMLResponse)
async def status(request: Request) -> Response:
    """Everything for an admin's key, what is a tenant's own for another."""
    sections = desk_of(request).status()
    sections = _everything(request, sections) if is_admin(request) else _own(sections, tenant_of(request))
    return HTMLResponse(status_page("tx", {"version": __version__} | sections))


def _everything(request: Request, sections: dict[str, Any]) -> dict[str, Any]:
    state = request.app.state
    rates = state.rates.look(_tokens(desk_of(request).metrics()))
    lines = {"open_polls": len(state.polls)} | {f"{name}_a_second": rate for name, rate in rates.items()}
    lines |= state.connections.metrics()
    return lines | sections | {"errors": state.errors.rows()}


def _own(sections: dict[str, Any], tenant: str) -> dict[str, Any]:
    engine = {name: sections["engine"][name] for name in ("state", "backend", "up_seconds", "deaths")}
    tables = {name: [row for row in sections[name] if row["tenant"] == tenant] for name in ("models", "tenants")}
    return {"engine": engine} | tables


def _tokens(metrics: dict[str, Any]) -> dict[str, float]:
    """Of all tenants together; nothing while there is no engine."""
    kinds = {"tokens_trained": "engine_train_tokens_total", "tokens_sampled": "engine_sample_tokens_total"}
    return {name: sum(metrics[metric].values()) for name, metric in kinds.items() if metric in metrics}
