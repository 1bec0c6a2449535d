"""Results: fetched by long polls, in the encoding that the client can read."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from tx.tinker.chunked_lists import encode_json
from tx.tinker.http import responses
from tx.tinker.http.bodies import read_json, run_in_thread_if_large
from tx.tinker.http.openapi import PROTOBUF, add_protobuf, describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.scope import get_service, get_tenant
from tx.tinker.service.results import StoredResult, TryAgain
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import encode_pass_output_json, sample_output_json

router = APIRouter(tags=["results"])

POLL_SECONDS = 30.0
"""Clients give a poll 45."""
METADATA_FIRST_FROM_BYTES = 256 * 1024
"""A client that asks for it is told of a larger result before it is sent, so that it can take what it has room for.
Smaller ones are not worth a second request."""

AS_JSON: dict[str, Callable[[bytes], dict[str, object]]] = {
    "train": encode_pass_output_json,
    "forward": encode_pass_output_json,
    "sample": sample_output_json,
}
"""Kinds of results that are kept as protobuf."""

_RESULT = add_protobuf(
    {
        "description": "The result, or `{error, category}`",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
)
_PENDING = {"model": responses.TryAgainLater, "description": "Not finished: poll again"}
_GONE = {"model": responses.Problem, "description": "The result has expired"}


@router.post(
    "/retrieve_future",
    **describe_route(
        responses.Nothing,
        schemas.RetrieveFutureRequest,
        also={200: _RESULT, 408: _PENDING, 410: _GONE},
        response_model=None,
    ),
)
async def retrieve_future(request: Request) -> Response:
    """Wait for the result up to half a minute. With `Accept: application/x-protobuf`, results of passes and samples are
    protobuf.
    """
    asked = await read_json(request, schemas.RetrieveFutureRequest)
    waiting = get_service(request).futures.retrieve(get_tenant(request), asked.request_id, POLL_SECONDS)
    result = await request.app.state.polls.wait_for(waiting)
    if result is None:
        result = TryAgain(asked.request_id, "paused_capacity", "the server is restarting")
    if isinstance(result, TryAgain):
        return _build_try_again(result)
    if result.error is not None:
        return to_json_response({"error": result.error, "category": result.category or "unknown"})
    if asked.allow_metadata_only and result.size_bytes > METADATA_FIRST_FROM_BYTES:
        return to_json_response({"status": "complete_metadata", "response_payload_size": result.size_bytes})
    return await _build_response(request, result)


def _build_try_again(result: TryAgain) -> Response:
    """Respond with 408, not 200: old clients log a warning for each 200."""
    body = {"type": "try_again", "request_id": result.request_id, "queue_state": result.queue_state}
    if result.queue_state_reason:
        body["queue_state_reason"] = result.queue_state_reason
    return to_json_response(body, 408)


async def _build_response(request: Request, result: StoredResult) -> Response:
    body = result.body or b"{}"
    read = AS_JSON.get(result.kind)
    if read is None:
        return Response(body, media_type="application/json")
    if PROTOBUF in request.headers.get("accept", ""):
        return Response(body, media_type=PROTOBUF)
    return Response(
        await run_in_thread_if_large(request, len(body), lambda: encode_json(read(body))), media_type="application/json"
    )
