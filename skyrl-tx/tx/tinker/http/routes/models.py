"""Models: adapters that are trained."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["models"])


@router.post("/create_model", **described(answers.Accepted, schemas.CreateModelRequest))
async def create_model(request: Request) -> Response:
    asked = await read_json(request, schemas.CreateModelRequest)
    return as_json(await desk_of(request).create_model(tenant_of(request), asked))


@router.post("/get_info", **described(answers.ModelInfo, schemas.GetInfoRequest))
async def get_info(request: Request) -> Response:
    asked = await read_json(request, schemas.GetInfoRequest)
    return as_json(await desk_of(request).get_info(tenant_of(request), asked.model_id))


@router.post("/unload_model", **described(answers.Accepted, schemas.UnloadModelRequest))
async def unload_model(request: Request) -> Response:
    asked = await read_json(request, schemas.UnloadModelRequest)
    return as_json(await desk_of(request).unload_model(tenant_of(request), asked.model_id))
