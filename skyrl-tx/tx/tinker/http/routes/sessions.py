"""Sessions of clients, kept alive by heartbeats."""

from fastapi import APIRouter, Request, Response

from tx.errors import RequestError
from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.parameters import Id, Limit, Offset
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas

router = APIRouter(tags=["sessions"])
_ENDED = {410: {"model": responses.Problem, "description": "The session has ended"}}


@router.post("/session_heartbeat", **describe_route(responses.Heartbeat, schemas.SessionHeartbeatRequest, also=_ENDED))
async def session_heartbeat(request: Request) -> Response:
    """Keep a session alive."""
    try:
        asked = await read_json(request, schemas.SessionHeartbeatRequest)
    except RequestError:  # the connection stalled, say
        get_service(request).sessions.keep_all(get_tenant(request))
        raise
    return to_json_response(await get_service(request).sessions.heartbeat(get_tenant(request), asked.session_id))


@router.post("/create_session", **describe_route(responses.SessionMade, schemas.CreateSessionRequest))
async def create_session(request: Request) -> Response:
    """Create a session."""
    asked = await read_json(request, schemas.CreateSessionRequest)
    return to_json_response(await get_service(request).sessions.create(get_tenant(request), asked))


@router.post("/sessions/{session_id}/finish", **describe_route(responses.Nothing, schemas.FinishSessionRequest))
async def finish_session(request: Request, session_id: Id) -> Response:
    """End a session: unload its models, remove its samplers."""
    await read_json(request, schemas.FinishSessionRequest)
    return to_json_response(await get_service(request).sessions.finish(get_tenant(request), session_id))


@router.get("/sessions", **describe_route(responses.SessionList))
async def list_sessions(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """List the sessions of the caller's key; `access_scope` has no effect."""
    return to_json_response(await get_service(request).sessions.list(get_tenant(request), limit, offset))


@router.get("/sessions/{session_id}", **describe_route(responses.SessionInfo))
async def get_session(request: Request, session_id: Id) -> Response:
    """Describe a session."""
    return to_json_response(await get_service(request).sessions.get(get_tenant(request), session_id))
