"""Training runs and the checkpoints they left."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Kind, Limit, Name, Offset, RunId
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["runs and checkpoints"])

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_DONE = {"status_code": 204, "response_class": Response}


@router.get("/training_runs", **described(answers.TrainingRuns))
async def training_runs(request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: str = "") -> Response:
    """The latest first. Every run of one's own key; `access_scope` changes nothing."""
    return as_json(await desk_of(request).training_runs(tenant_of(request), limit, offset))


@router.get("/training_runs/{run_id}", **described(answers.TrainingRun))
async def training_run(request: Request, run_id: RunId) -> Response:
    return as_json(await desk_of(request).training_run(tenant_of(request), run_id))


@router.get("/training_runs/{run_id}/checkpoints", **described(answers.Checkpoints))
async def run_checkpoints(request: Request, run_id: RunId) -> Response:
    return as_json(await desk_of(request).run_checkpoints(tenant_of(request), run_id))


@router.get("/checkpoints", **described(answers.Checkpoints))
async def checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Of all runs of one's own key."""
    return as_json(await desk_of(request).checkpoints(tenant_of(request), limit, offset))


@router.delete(CHECKPOINT, **described(answers.Nothing, **_DONE, response_model=None))
async def delete_checkpoint(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    await desk_of(request).delete_checkpoint(tenant_of(request), run_id, kind, name)
    return Response(status_code=204)


@router.put(f"{CHECKPOINT}/ttl", **described(answers.Nothing, schemas.SetTtlRequest, **_DONE, response_model=None))
async def set_ttl(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """From now on; null keeps it for ever."""
    asked = await read_json(request, schemas.SetTtlRequest)
    where = (tenant_of(request), run_id, kind, name)
    await desk_of(request).set_ttl(*where, asked.ttl_seconds)
    return Response(status_code=204)


@router.post(f"{CHECKPOINT}/publish", **described(answers.Nothing, **_DONE, response_model=None))
async def publish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    """Lets every key of this server read it."""
    await desk_of(request).publish(tenant_of(request), run_id, kind, name, True)
    return Response(status_code=204)


@router.delete(f"{CHECKPOINT}/publish", **described(answers.Nothing, **_DONE, response_model=None))
async def unpublish(request: Request, run_id: RunId, kind: Kind, name: Name) -> Response:
    await desk_of(request).publish(tenant_of(request), run_id, kind, name, False)
    return Response(status_code=204)
