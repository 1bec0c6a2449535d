"""Sessions: one for each client that lives, kept alive by its heartbeats."""

from fastapi import APIRouter, Request, Response

from tx.errors import RequestError
from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Id, Limit, Offset
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["sessions"])
_ENDED = {410: {"model": answers.Problem, "description": "The session has ended"}}


@router.post("/session_heartbeat", **described(answers.Heartbeat, schemas.SessionHeartbeatRequest, also=_ENDED))
async def session_heartbeat(request: Request) -> Response:
    try:
        asked = await read_json(request, schemas.SessionHeartbeatRequest)
    except RequestError:  # the connection stalled, say
        desk_of(request).keep_sessions(tenant_of(request))
        raise
    return as_json(await desk_of(request).heartbeat(tenant_of(request), asked.session_id))


@router.post("/create_session", **described(answers.SessionMade, schemas.CreateSessionRequest))
async def create_session(request: Request) -> Response:
    asked = await read_json(request, schemas.CreateSessionRequest)
    return as_json(await desk_of(request).create_session(tenant_of(request), asked))


@router.post("/sessions/{session_id}/finish", **described(answers.Nothing, schemas.FinishSessionRequest))
async def finish_session(request: Request, session_id: Id) -> Response:
    await read_json(request, schemas.FinishSessionRequest)
    return as_json(await desk_of(request).finish_session(tenant_of(request), session_id))


@router.get("/sessions", **described(answers.Sessions))
async def list_sessions(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """Every session of one's own key; `access_scope` changes nothing."""
    return as_json(await desk_of(request).list_sessions(tenant_of(request), limit, offset))


@router.get("/sessions/{session_id}", **described(answers.Session))
async def get_session(request: Request, session_id: Id) -> Response:
    return as_json(await desk_of(request).get_session(tenant_of(request), session_id))
