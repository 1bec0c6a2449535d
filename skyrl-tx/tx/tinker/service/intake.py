"""Intake of requests that change a model: deduplicated, durable before the response, in the order of their seqs.

Model and seq identify a request. A repetition gets the same id; one with other content is refused. A refused request
(4xx) uses up its seq; a rate-limited one (429) does not.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session as Database

from tx.errors import RequestError
from tx.tinker.commands import CommandAddress, EncodeContext, EncodedCommand, ModelState, StoredCommand, Unload
from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.limits import Limits
from tx.tinker.service.quotas import LONGEST_RETRY_SECONDS
from tx.tinker.service.repetitions import Repetitions, compute_digest
from tx.tinker.service.rows import fail_requests, insert_refusal, insert_request
from tx.tinker.service.sequencer import FURTHEST_AHEAD
from tx.tinker.service.state import PendingRequest, Run, ServerState, start_shared
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.store import Store, StoreError
from tx.tinker.types import format_request_id
from tx.tinker.wire.codec import TrainingRequest

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 2 * LONGEST_RETRY_SECONDS
"""Time after which a delayed request that did not come again delays no later ones: its client gave it up."""

Insert = Callable[[Database, PendingRequest], None]
"""Function that inserts a request's rows."""

R = TypeVar("R", bound="Sequenced", contravariant=True)


class Sequenced(Protocol):
    """A decoded request with a place in the order of its model."""

    @property
    def model_id(self) -> str | None: ...

    @property
    def seq_id(self) -> int | None: ...


class Encodable(Protocol[R]):
    """A class of commands."""

    def encode(
        self, request: R, address: CommandAddress, model: ModelState, context: EncodeContext
    ) -> Awaitable[EncodedCommand]: ...


class RequestIntake:
    """Acceptance of requests into the database and the queues."""

    def __init__(
        self, store: Store, blobs: Blobs, state: ServerState, limits: Limits, dispatch: Dispatch, context: EncodeContext
    ):
        self._store, self._blobs, self._state, self._limits = store, blobs, state, limits
        self._dispatch, self._context = dispatch, context
        self.repetitions = Repetitions(store)

    async def create(self, run: Run, stored: StoredCommand, insert: Insert, content: bytes) -> None:
        """Insert a new model with its first request."""
        start_shared(run.deciding, 0, self._create(run, stored, insert, content))
        await self.created(run)

    async def created(self, run: Run) -> None:
        """Wait until the model's creation is durable."""
        if (deciding := run.deciding.get(0)) is not None:
            await asyncio.shield(deciding)

    async def submit(self, tenant: str, command: Encodable[R], request: R) -> dict[str, str]:
        """Accept a request for a model, and return once it is durable.

        Raises:
            RequestError: the model does not exist, the request is invalid (which consumes its seq), or its seq is
                already used.
            Busy: retry later.
        """
        model_id, seq = request.model_id, request.seq_id
        assert model_id is not None and seq is not None
        content = await compute_digest(request)
        run, is_new = self._state.run(tenant, model_id), False
        if (deciding := run.deciding.get(seq)) is None and not run.sequence.knows(seq):
            if run.sequence.too_far(seq):
                expected = run.sequence.next_seq
                raise RequestError(f"seq_id must be {expected} to {expected + FURTHEST_AHEAD} at this point; got {seq}")
            if seq != run.sequence.next_seq:  # that one is what others wait for
                self._limits.admit_training(tenant)
            tokens = self._admit_tokens(run, seq, request)
            address = CommandAddress(format_request_id(model_id, seq), tenant, model_id, seq)
            encode = partial(command.encode, request, address, run, self._context)
            deciding, is_new = (
                start_shared(run.deciding, seq, self._handle_with_charge(run, seq, encode, content, tokens)),
                True,
            )
        if deciding is not None:
            await asyncio.shield(deciding)
        elif seq in run.refused:
            raise run.refused[seq]
        if not is_new:
            await self.repetitions.check(format_request_id(model_id, seq), content)
        return {"request_id": format_request_id(model_id, seq), "model_id": model_id}

    async def refuse(self, tenant: str, model_id: str, seq: int, error: str) -> None:
        """Record a refusal (4xx) by the HTTP layer: it consumes the seq. No effect if the model does not exist."""
        run = self._state.runs.get(model_id)
        if run is None or run.tenant != tenant or run.sequence.too_far(seq) or run.sequence.knows(seq):
            return

        async def refused() -> EncodedCommand:
            raise RequestError(error)

        deciding = run.deciding.get(seq) or start_shared(run.deciding, seq, self._decide(run, seq, refused))
        await asyncio.wait((deciding,))

    async def unload(self, run: Run) -> str:
        """Unload the model after its accepted requests. Returns: the request's id, once it is durable."""
        if run.unloading is None:
            run.unloading = asyncio.create_task(self._submit_unload(run))
        try:
            await asyncio.shield(run.unloading)
        except StoreError:
            run.unloading = None
            raise
        return format_request_id(run.model_id, "unload")

    async def give_up_gaps(self, run: Run, waiting_since_before: float, timeout: float) -> None:
        """Fail requests with a missing predecessor, so that later ones can proceed."""
        while (given_up := run.sequence.give_up(waiting_since_before)) is not None:
            first, last = given_up.missing[0], given_up.missing[-1]
            missing = f"seq_id {first}" if first == last else f"seq_ids {first} to {last}"
            late = f"{missing} did not arrive within {timeout:g} s"
            log.warning("%s: %s; %d later requests fail", run.model_id, late, len(given_up.stranded))
            refusals = {
                seq: RequestError(f"seq_id {seq} arrived too late: it was abandoned after {timeout:g} s")
                for seq in given_up.missing
            }
            run.refused |= refusals
            pending_requests = given_up.stranded
            error = f"not executed, because {late} and requests of a model are executed in order"

            def unit(database: Database, pending_requests=pending_requests, error=error, refusals=refusals) -> None:
                fail_requests(database, pending_requests, error, "user")
                for seq, refusal in refusals.items():
                    insert_refusal(database, run.tenant, run.model_id, seq, refusal)

            await self._dispatch.fail(pending_requests, error, "user", unit)
            self._dispatch.pump(run)

    async def _create(self, run: Run, stored: StoredCommand, insert: Insert, content: bytes) -> None:
        request_id = format_request_id(run.model_id, 0)
        pending = PendingRequest(request_id, run.tenant, "create", stored, content, run=run, seq=0)
        try:
            await self._add_request(pending, insert)
        except BaseException:
            del self._state.runs[run.model_id]
            raise
        self._dispatch.due(run, run.sequence.offer(0, pending, time.monotonic()))

    def _admit_tokens(self, run: Run, seq: int, request: object) -> int:
        """Check the quota of tokens per minute. Returns: tokens of a pass, 0 of all else. Raises: Busy."""
        if not isinstance(request, TrainingRequest):
            return 0
        tokens, quota = sum(len(datum.tokens) for datum in request.data), self._limits.quota
        now, expected = time.monotonic(), run.sequence.next_seq
        run.delayed = {each: at for each, at in run.delayed.items() if each >= expected and now - at < PATIENCE_SECONDS}
        earlier = min(run.delayed, default=seq)
        run.delayed[seq] = now
        if earlier < seq:  # otherwise later requests would use the remainder, and the model would wait for this one
            quota.refuse(run.tenant, 1.0)
        quota.admit(run.tenant)
        del run.delayed[seq]
        return tokens

    async def _handle_with_charge(
        self, run: Run, seq: int, encode: Callable[[], Awaitable[EncodedCommand]], content: bytes, tokens: int
    ) -> None:
        """Decide on a request, and give the tokens of one that is refused back."""
        self._limits.quota.charge(run.tenant, tokens)

        async def checked() -> EncodedCommand:
            self._limits.quota.check_size(tokens)
            return await encode()

        try:
            await self._decide(run, seq, checked, content)
        except BaseException:
            self._limits.quota.charge(run.tenant, -tokens)
            raise

    async def _decide(
        self, run: Run, seq: int, encode: Callable[[], Awaitable[EncodedCommand]], content: bytes | None = None
    ) -> None:
        request_id = format_request_id(run.model_id, seq)
        try:
            encoded = await encode()
        except RequestError as error:
            await self._store.write(
                partial(insert_refusal, tenant=run.tenant, model_id=run.model_id, seq=seq, refusal=error)
            )
            run.refused[seq] = error
            self._dispatch.due(run, run.sequence.offer(seq, None, time.monotonic()))
            raise
        pending = PendingRequest(request_id, run.tenant, encoded.kind, encoded.stored, content, run=run, seq=seq)
        if encoded.payload is not None:
            pending.payload = encoded.payload
            pending.payload_blob = await asyncio.to_thread(self._blobs.put, encoded.payload)
        await self._add_request(pending)
        run.unsaved_request_at = time.time()
        self._dispatch.due(run, run.sequence.offer(seq, pending, time.monotonic()))

    async def _add_request(self, pending: PendingRequest, insert: Insert = insert_request) -> None:
        """Insert the request; if that fails, forget it."""
        self._limits.enter(pending.tenant, None)
        self._state.promise(pending)
        self._state.pending[pending.request_id] = pending
        try:
            await self._store.write(lambda database: insert(database, pending))
        except IntegrityError:
            log.warning("%s had already been recorded, although the write seemed to fail", pending.request_id)
        except BaseException as error:
            self._limits.leave(pending.tenant, None)
            self._state.keep_promise(pending)
            del self._state.pending[pending.request_id]
            if pending.payload_blob is not None and not _is_possibly_written(error):
                await asyncio.to_thread(self._blobs.drop, pending.payload_blob)
            raise

    async def _submit_unload(self, run: Run) -> None:
        if run.deciding:
            await asyncio.wait(list(run.deciding.values()))
        if stranded := run.sequence.drain():
            error = "not executed: the model was unloaded before its earlier requests arrived"
            await self._dispatch.fail(stranded, error, "user")
        request_id = format_request_id(run.model_id, "unload")
        stored = Unload.encode(run.tenant, run.model_id, run.sequence.next_seq)
        pending = PendingRequest(request_id, run.tenant, "unload", stored, run=run)
        await self._add_request(pending)
        self._dispatch.due(run, [pending])


def _is_possibly_written(error: BaseException) -> bool:
    """Return True if the row, which names the blob, may have been written despite the error."""
    return isinstance(error, StoreError) and error.may_stand
