"""Weights: saved, loaded, told about. Checkpoints that stand already are in `checkpoints`."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json, read_json_in_order
from tx.tinker.http.openapi import described
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["weights"])


@router.post("/save_weights", **described(answers.Accepted, schemas.SaveWeightsRequest))
async def save_weights(request: Request) -> Response:
    asked = await read_json_in_order(request, schemas.SaveWeightsRequest)
    return as_json(await desk_of(request).save_weights(tenant_of(request), asked))


@router.post("/save_weights_for_sampler", **described(answers.Accepted, schemas.SaveWeightsForSamplerRequest))
async def save_weights_for_sampler(request: Request) -> Response:
    asked = await read_json_in_order(request, schemas.SaveWeightsForSamplerRequest)
    return as_json(await desk_of(request).save_weights_for_sampler(tenant_of(request), asked))


@router.post("/load_weights", **described(answers.Accepted, schemas.LoadWeightsRequest))
async def load_weights(request: Request) -> Response:
    """Into a model (`model_id`, `seq_id`), or as a new one (`session_id`, `model_seq_id`)."""
    asked = await read_json_in_order(request, schemas.LoadWeightsRequest)
    return as_json(await desk_of(request).load_weights(tenant_of(request), asked))


@router.post("/weights_info", **described(answers.WeightsInfo, schemas.WeightsInfoRequest))
async def weights_info(request: Request) -> Response:
    asked = await read_json(request, schemas.WeightsInfoRequest)
    return as_json(await desk_of(request).weights_info(tenant_of(request), asked.tinker_path))
