"""Sampling."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Id
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import service_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["sampling"])


@router.post("/asample", **described(responses.SampleAccepted, schemas.AsampleRequest))
async def asample(request: Request) -> Response:
    """Accept a sample request."""
    asked = await read_json(request, schemas.AsampleRequest)
    key = request.headers.get("x-idempotency-key")
    return as_json(await service_of(request).sampling.asample(tenant_of(request), asked, key))


@router.post(
    "/create_sampling_session", **described(responses.SamplingSessionMade, schemas.CreateSamplingSessionRequest)
)
async def create_sampling_session(request: Request) -> Response:
    """Create a sampler."""
    asked = await read_json(request, schemas.CreateSamplingSessionRequest)
    return as_json(await service_of(request).sampling.create_sampler(tenant_of(request), asked))


@router.get("/samplers/{sampler_id}", **described(responses.SamplerInfo))
async def get_sampler(request: Request, sampler_id: Id) -> Response:
    """Describe a sampler."""
    return as_json(await service_of(request).sampling.get_sampler(tenant_of(request), sampler_id))
