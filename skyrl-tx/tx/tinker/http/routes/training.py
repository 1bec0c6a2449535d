"""Training: passes and optimizer steps, executed in `seq_id` order regardless of arrival order."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from tx.errors import RequestError
from tx.tinker.commands import Optimize, Train
from tx.tinker.http import responses
from tx.tinker.http.bodies import (
    check_content_type,
    max_body_bytes,
    read_body,
    read_json_in_order,
    record_refusal,
    run_in_thread_if_large,
)
from tx.tinker.http.openapi import (
    PROTOBUF,
    ForwardBackwardBody,
    ForwardBody,
    add_protobuf,
    describe_json_body,
    describe_route,
)
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.wire import schemas
from tx.tinker.wire.losses import STABLE_REINFORCE
from tx.tinker.wire.training_requests import read_training_body, set_loss

router = APIRouter(tags=["training"])


def _describe_pass_route(body: type[BaseModel]) -> dict:
    """Describe a route that accepts JSON or protobuf, optionally compressed (`Content-Encoding: zstd`)."""
    return describe_route(
        responses.Accepted, body, openapi_extra={"requestBody": add_protobuf(describe_json_body(body))}
    )


@router.post("/forward_backward", **_describe_pass_route(ForwardBackwardBody))
async def forward_backward(request: Request) -> Response:
    """Accept a pass that adds to the model's gradient."""
    return await _train(request, forward_only=False)


@router.post("/forward", **_describe_pass_route(ForwardBody))
async def forward(request: Request) -> Response:
    """Log-probs and loss, without a gradient. Clients from 0.25 on ask `forward_backward` for it."""
    return await _train(request, forward_only=True)


@router.post("/optim_step", **describe_route(responses.Accepted, schemas.OptimStepRequest))
async def optim_step(request: Request) -> Response:
    """Accept an optimizer step, which clears the gradient."""
    asked = await read_json_in_order(request, schemas.OptimStepRequest)
    return to_json_response(await get_service(request).intake.submit(get_tenant(request), Optimize, asked))


async def _train(request: Request, *, forward_only: bool) -> Response:
    check_content_type(request, "application/json", PROTOBUF, "application/protobuf")
    body = await read_body(request)
    content_type, encoding = request.headers["content-type"], request.headers.get("content-encoding")
    try:
        asked = await run_in_thread_if_large(
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
        await record_refusal(request, body, error)
        raise
    if asked.loss_fn == STABLE_REINFORCE and (instead := request.app.state.config.stable_reinforce_as) is not None:
        asked = set_loss(asked, instead)
    return to_json_response(await get_service(request).intake.submit(get_tenant(request), Train, asked))
