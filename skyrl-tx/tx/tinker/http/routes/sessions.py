"""Sessions of clients, kept alive by heartbeats."""

from fastapi import APIRouter, Request, Response

from tx.errors import RequestError
from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Id, Limit, Offset
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import service_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["sessions"])
_ENDED = {410: {"model": responses.Problem, "description": "The session has ended"}}


@router.post("/session_heartbeat", **described(responses.Heartbeat, schemas.SessionHeartbeatRequest, also=_ENDED))
async def session_heartbeat(request: Request) -> Response:
    """Keep a session alive."""
    try:
        asked = await read_json(request, schemas.SessionHeartbeatRequest)
    except RequestError:  # the connection stalled, say
        service_of(request).sessions.keep_all(tenant_of(request))
        raise
    return as_json(await service_of(request).sessions.heartbeat(tenant_of(request), asked.session_id))


@router.post("/create_session", **described(responses.SessionMade, schemas.CreateSessionRequest))
async def create_session(request: Request) -> Response:
    """Create a session."""
    asked = await read_json(request, schemas.CreateSessionRequest)
    return as_json(await service_of(request).sessions.create(tenant_of(request), asked))


@router.post("/sessions/{session_id}/finish", **described(responses.Nothing, schemas.FinishSessionRequest))
async def finish_session(request: Request, session_id: Id) -> Response:
    """End a session: unload its models, remove its samplers."""
    await read_json(request, schemas.FinishSessionRequest)
    return as_json(await service_of(request).sessions.finish(tenant_of(request), session_id))


@router.get("/sessions", **described(responses.SessionList))
async def list_sessions(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """Every session of one's own key; `access_scope` changes nothing."""
    return as_json(await service_of(request).sessions.list(tenant_of(request), limit, offset))


@router.get("/sessions/{session_id}", **described(responses.SessionInfo))
async def get_session(request: Request, session_id: Id) -> Response:
    """Describe a session."""
    return as_json(await service_of(request).sessions.get(tenant_of(request), session_id))
