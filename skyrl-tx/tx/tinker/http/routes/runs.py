"""Training runs and the checkpoints they left."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.parameters import Kind, Limit, Name, Offset, RunId
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas

router = APIRouter(tags=["runs and checkpoints"])

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_DONE = {"status_code": 204, "response_class": Response}


@router.get("/training_runs", **describe_route(responses.TrainingRuns))
async def training_runs(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """List the runs of the caller's key, newest first; `access_scope` has no effect."""
    return to_json_response(await get_service(request).checkpoints.training_runs(get_tenant(request), limit, offset))


@router.get("/training_runs/{run_id}", **describe_route(responses.TrainingRun))
async def training_run(request: Request, run_id: RunId) -> Response:
    """Describe a training run."""
    return to_json_response(await get_service(request).checkpoints.training_run(get_tenant(request), run_id))


@router.get("/training_runs/{run_id}/checkpoints", **describe_route(responses.CheckpointList))
async def run_checkpoints(request: Request, run_id: RunId) -> Response:
    """List the checkpoints of a run, newest first."""
    return to_json_response(await get_service(request).checkpoints.of_run(get_tenant(request), run_id))


@router.get("/checkpoints", **describe_route(responses.CheckpointList))
async def checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the checkpoints of all runs of the caller's key."""
    return to_json_response(await get_service(request).checkpoints.of_tenant(get_tenant(request), limit, offset))


@router.delete(CHECKPOINT, **describe_route(responses.Nothing, **_DONE, response_model=None))
async def delete_checkpoint(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Delete a checkpoint."""
    await get_service(request).checkpoints.delete(get_tenant(request), run_id, kind, name)
    return Response(status_code=204)


@router.put(
    f"{CHECKPOINT}/ttl", **describe_route(responses.Nothing, schemas.SetTtlRequest, **_DONE, response_model=None)
)
async def set_ttl(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Set the time to live from now on; null keeps the checkpoint for ever."""
    asked = await read_json(request, schemas.SetTtlRequest)
    where = (get_tenant(request), run_id, kind, name)
    await get_service(request).checkpoints.set_ttl(*where, asked.ttl_seconds)
    return Response(status_code=204)


@router.post(f"{CHECKPOINT}/publish", **describe_route(responses.Nothing, **_DONE, response_model=None))
async def publish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Make a checkpoint readable for all keys of this server."""
    await get_service(request).checkpoints.publish(get_tenant(request), run_id, kind, name, True)
    return Response(status_code=204)


@router.delete(f"{CHECKPOINT}/publish", **describe_route(responses.Nothing, **_DONE, response_model=None))
async def unpublish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Forbid other keys to read a checkpoint."""
    await get_service(request).checkpoints.publish(get_tenant(request), run_id, kind, name, False)
    return Response(status_code=204)
