"""Training: passes and optimizer steps, in the order of their `seq_id` whatever the order they come in."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from tx.errors import RequestError
from tx.tinker.commands import Optimize, Train
from tx.tinker.http import responses
from tx.tinker.http.bodies import (
    in_thread_if_large,
    max_body_bytes,
    read_body,
    read_json_in_order,
    require_content_type,
    use_up_place,
)
from tx.tinker.http.openapi import PROTOBUF, ForwardBackwardBody, ForwardBody, described, json_body, with_protobuf
from tx.tinker.http.replies import as_json
from tx.tinker.http.scope import service_of, tenant_of
from tx.tinker.wire import schemas
from tx.tinker.wire.losses import STABLE_REINFORCE
from tx.tinker.wire.training_requests import read_training_body, with_loss

router = APIRouter(tags=["training"])


def _pass(body: type[BaseModel]) -> dict:
    """A route that takes JSON or protobuf, which may be packed (`Content-Encoding: zstd`)."""
    return described(responses.Accepted, body, openapi_extra={"requestBody": with_protobuf(json_body(body))})


@router.post("/forward_backward", **_pass(ForwardBackwardBody))
async def forward_backward(request: Request) -> Response:
    """Accept a pass that adds to the model's gradient."""
    return await _train(request, forward_only=False)


@router.post("/forward", **_pass(ForwardBody))
async def forward(request: Request) -> Response:
    """Log-probs and loss, without a gradient. Clients from 0.25 on ask `forward_backward` for it."""
    return await _train(request, forward_only=True)


@router.post("/optim_step", **described(responses.Accepted, schemas.OptimStepRequest))
async def optim_step(request: Request) -> Response:
    """Accept an optimizer step, which clears the gradient."""
    asked = await read_json_in_order(request, schemas.OptimStepRequest)
    return as_json(await service_of(request).intake.submit(tenant_of(request), Optimize, asked))


async def _train(request: Request, *, forward_only: bool) -> Response:
    require_content_type(request, "application/json", PROTOBUF, "application/protobuf")
    body = await read_body(request)
    content_type, encoding = request.headers["content-type"], request.headers.get("content-encoding")
    try:
        asked = await in_thread_if_large(
            request,
            len(body),
            lambda: read_training_body(
                body,
                content_type,
                encoding,
                forward_only_default=forward_only,
                max_bytes=max_body_bytes(request),
            ),
        )
    except RequestError as error:
        await use_up_place(request, body, error)
        raise
    if asked.loss_fn == STABLE_REINFORCE and (instead := request.app.state.config.stable_reinforce_as) is not None:
        asked = with_loss(asked, instead)
    return as_json(await service_of(request).intake.submit(tenant_of(request), Train, asked))
