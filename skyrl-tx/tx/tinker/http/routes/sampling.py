"""Sampling."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.parameters import Id
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas

router = APIRouter(tags=["sampling"])


@router.post("/asample", **describe_route(responses.SampleAccepted, schemas.AsampleRequest))
async def asample(request: Request) -> Response:
    """Accept a sample request."""
    asked = await read_json(request, schemas.AsampleRequest)
    key = request.headers.get("x-idempotency-key")
    return to_json_response(await get_service(request).sampling.asample(get_tenant(request), asked, key))


@router.post(
    "/create_sampling_session", **describe_route(responses.SamplingSessionMade, schemas.CreateSamplingSessionRequest)
)
async def create_sampling_session(request: Request) -> Response:
    """Create a sampler."""
    asked = await read_json(request, schemas.CreateSamplingSessionRequest)
    return to_json_response(await get_service(request).sampling.create_sampler(get_tenant(request), asked))


@router.get("/samplers/{sampler_id}", **describe_route(responses.SamplerInfo))
async def get_sampler(request: Request, sampler_id: Id) -> Response:
    """Describe a sampler."""
    return to_json_response(await get_service(request).sampling.get_sampler(get_tenant(request), sampler_id))
