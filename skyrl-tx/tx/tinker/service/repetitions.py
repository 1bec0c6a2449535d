"""Deduplication of repeated requests: the same seq must have the same content.

Clients repeat a request whose response was lost. A reused seq with other content is a client error (two programs with
one model, a counter that was reset); otherwise the client would get the result of another request.
"""

import asyncio
import hashlib
from functools import partial

from pydantic import BaseModel
from sqlalchemy import select
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.commands import THREAD_FROM_BYTES, THREAD_FROM_TOKENS
from tx.tinker.storage.db_models import RequestRow
from tx.tinker.storage.store import Store
from tx.tinker.wire.codec import TrainingRequest
from tx.tinker.wire.schemas import AsampleRequest


async def compute_digest(request: object) -> bytes:
    """Hash the content of a request. Equal for JSON and protobuf, whatever the order of maps, and for releases in which
    a request has more fields."""
    if isinstance(request, TrainingRequest):
        if len(request.payload) >= THREAD_FROM_BYTES:
            return await asyncio.to_thread(_compute_pass_digest, request)
        return _compute_pass_digest(request)
    assert isinstance(request, BaseModel)
    if isinstance(request, AsampleRequest) and request.num_tokens > THREAD_FROM_TOKENS:
        return await asyncio.to_thread(_compute_model_digest, request)
    return _compute_model_digest(request)


def _compute_model_digest(request: BaseModel) -> bytes:
    content = request.model_dump_json(exclude_defaults=True)
    return hashlib.sha256(f"{type(request).__name__}{content}".encode()).digest()[:16]


def _compute_pass_digest(request: TrainingRequest) -> bytes:
    settings = (request.forward_only, request.loss_fn, sorted(request.loss_config.items()))
    found = hashlib.sha256(repr(settings).encode())
    for datum in request.data:
        for name, array in (("", datum.tokens), *sorted(datum.inputs.items())):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
    return found.digest()[:16]


class Repetitions:
    """Comparison of repeated requests with those that were accepted."""

    def __init__(self, store: Store):
        self._store = store

    async def check(self, request_id: str, content: bytes) -> None:
        """Compare a request with the stored request of this id, if any.

        Raises:
            RequestError: the content differs.
        """
        before = await self._store.read(partial(_extract_content, request_id=request_id))
        if before is not None and before != content:
            owner, _, seq = request_id.rpartition(":")
            raise RequestError(
                f"seq_id: {seq} of {owner} was already used with different content; repeat a request unchanged, or "
                "use the next number (two programs that use the same id need a common counter)"
            )


def _extract_content(database: Database, request_id: str) -> bytes | None:
    return database.scalar(select(col(RequestRow.content)).where(col(RequestRow.request_id) == request_id))
