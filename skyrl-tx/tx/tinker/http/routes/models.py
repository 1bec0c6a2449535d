"""Models: adapters that are trained."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import service_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["models"])


@router.post("/create_model", **described(responses.Accepted, schemas.CreateModelRequest))
async def create_model(request: Request) -> Response:
    """Create a model with a new adapter."""
    asked = await read_json(request, schemas.CreateModelRequest)
    return as_json(await service_of(request).models.create(tenant_of(request), asked))


@router.post("/get_info", **described(responses.ModelInfo, schemas.GetInfoRequest))
async def get_info(request: Request) -> Response:
    """Describe a model."""
    asked = await read_json(request, schemas.GetInfoRequest)
    return as_json(await service_of(request).models.get_info(tenant_of(request), asked.model_id))


@router.post("/unload_model", **described(responses.Accepted, schemas.UnloadModelRequest))
async def unload_model(request: Request) -> Response:
    """Unload a model after its accepted requests."""
    asked = await read_json(request, schemas.UnloadModelRequest)
    return as_json(await service_of(request).models.unload(tenant_of(request), asked.model_id))
