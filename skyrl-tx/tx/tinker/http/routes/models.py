"""Models: adapters that are trained."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas

router = APIRouter(tags=["models"])


@router.post("/create_model", **describe_route(responses.Accepted, schemas.CreateModelRequest))
async def create_model(request: Request) -> Response:
    """Create a model with a new adapter."""
    asked = await read_json(request, schemas.CreateModelRequest)
    return to_json_response(await get_service(request).models.create(get_tenant(request), asked))


@router.post("/get_info", **describe_route(responses.ModelInfo, schemas.GetInfoRequest))
async def get_info(request: Request) -> Response:
    """Describe a model."""
    asked = await read_json(request, schemas.GetInfoRequest)
    return to_json_response(await get_service(request).models.get_info(get_tenant(request), asked.model_id))


@router.post("/unload_model", **describe_route(responses.Accepted, schemas.UnloadModelRequest))
async def unload_model(request: Request) -> Response:
    """Unload a model after its accepted requests."""
    asked = await read_json(request, schemas.UnloadModelRequest)
    return to_json_response(await get_service(request).models.unload(get_tenant(request), asked.model_id))
