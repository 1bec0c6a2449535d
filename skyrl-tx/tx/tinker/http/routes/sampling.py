"""Sampling."""

from fastapi import APIRouter, Request, Response

from tx.tinker.http import answers
from tx.tinker.http.bodies import read_json
from tx.tinker.http.openapi import described
from tx.tinker.http.parameters import Id
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import desk_of, tenant_of
from tx.tinker.wire import schemas

router = APIRouter(tags=["sampling"])


@router.post("/asample", **described(answers.SampleAccepted, schemas.AsampleRequest))
async def asample(request: Request) -> Response:
    asked = await read_json(request, schemas.AsampleRequest)
    key = request.headers.get("x-idempotency-key")
    return as_json(await desk_of(request).asample(tenant_of(request), asked, key))


@router.post("/create_sampling_session", **described(answers.SamplingSessionMade, schemas.CreateSamplingSessionRequest))
async def create_sampling_session(request: Request) -> Response:
    asked = await read_json(request, schemas.CreateSamplingSessionRequest)
    return as_json(await desk_of(request).create_sampling_session(tenant_of(request), asked))


@router.get("/samplers/{sampler_id}", **described(answers.Sampler))
async def get_sampler(request: Request, sampler_id: Id) -> Response:
    return as_json(await desk_of(request).get_sampler(tenant_of(request), sampler_id))
