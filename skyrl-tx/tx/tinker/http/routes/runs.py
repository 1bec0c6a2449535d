"""Training runs and the checkpoints they left."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Kind, Limit, Name, Offset, RunId
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import service_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["runs and checkpoints"])

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_DONE = {"status_code": 204, "response_class": Response}


@router.get("/training_runs", **described(responses.TrainingRuns))
async def training_runs(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """The latest first. Every run of one's own key; `access_scope` changes nothing."""
    return as_json(await service_of(request).checkpoints.training_runs(tenant_of(request), limit, offset))


@router.get("/training_runs/{run_id}", **described(responses.TrainingRun))
async def training_run(request: Request, run_id: RunId) -> Response:
    """Describe a training run."""
    return as_json(await service_of(request).checkpoints.training_run(tenant_of(request), run_id))


@router.get("/training_runs/{run_id}/checkpoints", **described(responses.CheckpointList))
async def run_checkpoints(request: Request, run_id: RunId) -> Response:
    """List the checkpoints of a run, newest first."""
    return as_json(await service_of(request).checkpoints.of_run(tenant_of(request), run_id))


@router.get("/checkpoints", **described(responses.CheckpointList))
async def checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the checkpoints of all runs of the caller's key."""
    return as_json(await service_of(request).checkpoints.of_tenant(tenant_of(request), limit, offset))


@router.delete(CHECKPOINT, **described(responses.Nothing, **_DONE, response_model=None))
async def delete_checkpoint(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Delete a checkpoint."""
    await service_of(request).checkpoints.delete(tenant_of(request), run_id, kind, name)
    return Response(status_code=204)


@router.put(f"{CHECKPOINT}/ttl", **described(responses.Nothing, schemas.SetTtlRequest, **_DONE, response_model=None))
async def set_ttl(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Set the time to live from now on; null keeps the checkpoint for ever."""
    asked = await read_json(request, schemas.SetTtlRequest)
    where = (tenant_of(request), run_id, kind, name)
    await service_of(request).checkpoints.set_ttl(*where, asked.ttl_seconds)
    return Response(status_code=204)


@router.post(f"{CHECKPOINT}/publish", **described(responses.Nothing, **_DONE, response_model=None))
async def publish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Make a checkpoint readable for all keys of this server."""
    await service_of(request).checkpoints.publish(tenant_of(request), run_id, kind, name, True)
    return Response(status_code=204)


@router.delete(f"{CHECKPOINT}/publish", **described(responses.Nothing, **_DONE, response_model=None))
async def unpublish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Forbid other keys to read a checkpoint."""
    await service_of(request).checkpoints.publish(tenant_of(request), run_id, kind, name, False)
    return Response(status_code=204)
