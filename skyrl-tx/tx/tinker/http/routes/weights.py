"""Routes that save, load and describe weights. Existing checkpoints are handled by `checkpoints`."""

from fastapi import APIRouter, Request, Response

from tx.tinker.commands import Load, Save
from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json, read_json_in_order
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas

router = APIRouter(tags=["weights"])


@router.post("/save_weights", **describe_route(responses.Accepted, schemas.SaveWeightsRequest))
async def save_weights(request: Request) -> Response:
    """Accept the save of a training checkpoint."""
    asked = await read_json_in_order(request, schemas.SaveWeightsRequest)
    return to_json_response(await get_service(request).intake.submit(get_tenant(request), Save, asked))


@router.post("/save_weights_for_sampler", **describe_route(responses.Accepted, schemas.SaveWeightsForSamplerRequest))
async def save_weights_for_sampler(request: Request) -> Response:
    """Accept the save of sampler weights, named or for a sampling session."""
    asked = await read_json_in_order(request, schemas.SaveWeightsForSamplerRequest)
    return to_json_response(await get_service(request).intake.submit(get_tenant(request), Save, asked))


@router.post("/save_weights_external", **describe_route(responses.Accepted, schemas.SaveWeightsExternalRequest))
async def save_weights_external(request: Request) -> Response:
    """Accept the save of weights to download, perhaps encrypted."""
    asked = await read_json_in_order(request, schemas.SaveWeightsExternalRequest)
    return to_json_response(await get_service(request).intake.submit(get_tenant(request), Save, asked))


@router.post("/load_weights", **describe_route(responses.Accepted, schemas.LoadWeightsRequest))
async def load_weights(request: Request) -> Response:
    """Load into a model (`model_id`, `seq_id`), or as a new one (`session_id`, `model_seq_id`)."""
    asked = await read_json_in_order(request, schemas.LoadWeightsRequest)
    service, tenant = get_service(request), get_tenant(request)
    if asked.creates_model:
        return to_json_response(await service.models.create_from_checkpoint(tenant, asked))
    return to_json_response(await service.intake.submit(tenant, Load, asked))


@router.post("/weights_info", **describe_route(responses.WeightsInfo, schemas.WeightsInfoRequest))
async def weights_info(request: Request) -> Response:
    """Describe the adapter of a checkpoint."""
    asked = await read_json(request, schemas.WeightsInfoRequest)
    return to_json_response(await get_service(request).checkpoints.weights_info(get_tenant(request), asked.tinker_path))
