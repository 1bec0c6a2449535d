"""Samplers and samples. The weights of a sampler are immutable, whatever is trained, replaced or deleted later."""

import asyncio
import hashlib
import secrets
import time
from functools import partial

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session as Database

from tx.errors import RequestError
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.commands import THREAD_FROM_TOKENS, Sample
from tx.tinker.service.checkpoints import Checkpoints
from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.limits import Limits
from tx.tinker.service.repetitions import Repetitions, compute_digest
from tx.tinker.service.rows import insert_request
from tx.tinker.service.runs import Runs, draw_seed
from tx.tinker.service.state import PendingRequest, Sampler, ServerState, start_shared
from tx.tinker.storage.db_models import SamplerRow, SessionRow
from tx.tinker.storage.store import Store
from tx.tinker.types import TARGETS_REFUSED, SampleSpec, format_request_id, format_sampler_id
from tx.tinker.wire import schemas
from tx.tinker.wire.checks import check_sample
from tx.tinker.wire.losses import ELSEWHERE, STABLE_REINFORCE

_LOSS_IS_ELSEWHERE = ELSEWHERE[STABLE_REINFORCE]


class Samplers:
    """Samplers and their sample requests.

    Args:
        records_stability: accept requests to record inputs of `stable_reinforce`, without recording anything
        scores_targets: the backend computes `target_prompt_logprobs`
    """

    def __init__(
        self,
        facts: BaseModelFacts,
        store: Store,
        state: ServerState,
        limits: Limits,
        dispatch: Dispatch,
        runs: Runs,
        checkpoints: Checkpoints,
        *,
        records_stability: bool = False,
        scores_targets: bool = True,
    ):
        self._records_stability, self._scores_targets = records_stability, scores_targets
        self._facts, self._store, self._state, self._limits = facts, store, state, limits
        self._dispatch, self._runs, self._checkpoints = dispatch, runs, checkpoints
        self._repetitions = Repetitions(store)

    # ---- samplers

    async def create_sampler(self, tenant: str, request: schemas.CreateSamplingSessionRequest) -> dict[str, object]:
        """Create a sampler of a checkpoint or the base model, unless it exists."""
        session = self._state.session(tenant, request.session_id)
        sampler_id = format_sampler_id(session.session_id, request.sampling_session_seq_id)
        if sampler_id in self._state.promised_samplers:
            raise RequestError(
                f"sampling_session_seq_id {request.sampling_session_seq_id} is in use by a save_weights_for_sampler "
                "in progress: use the next number"
            )
        if (sampler := self._state.samplers.get(sampler_id)) is not None:
            _check_same(sampler, request)
        else:
            row = await self._create_sampler(tenant, sampler_id, request)
            await self._store.write(partial(_insert_sampler, row=row))
            row = await self._store.read(lambda database: database.get_one(SamplerRow, sampler_id))
            sampler = Sampler.of(row)
            _check_same(sampler, request)  # another request may have been faster
            if request.session_id in self._state.sessions:
                self._state.samplers.setdefault(sampler_id, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def get_sampler(self, tenant: str, sampler_id: str) -> dict[str, object]:
        """Describe a sampler. Raises: RequestError 404."""
        row = await self._store.read(lambda database: database.get(SamplerRow, sampler_id))
        if row is None or row.tenant != tenant:
            raise RequestError(f"sampler {sampler_id[:200]!r} does not exist", 404)
        return {"sampler_id": sampler_id, "base_model": row.base_model, "model_path": row.model_path}

    async def _create_sampler(
        self, tenant: str, sampler_id: str, request: schemas.CreateSamplingSessionRequest
    ) -> SamplerRow:
        row = SamplerRow(
            sampler_id=sampler_id,
            tenant=tenant,
            session_id=request.session_id,
            sampling_session_seq_id=request.sampling_session_seq_id,
            base_model=request.base_model or "",
            created_at=time.time(),
        )
        if request.base_model is not None:
            self._runs.check_base_model(request.base_model)
        if request.model_path is not None:
            source = await self._checkpoints.source(tenant, request.model_path, setting="model_path")
            row.base_model, row.model_path = request.base_model or source.base_model, source.path
            row.model_id, row.folder = source.model_id, source.folder
        return row

    # ---- samples

    async def asample(
        self, tenant: str, request: schemas.AsampleRequest, idempotency_key: str | None = None
    ) -> dict[str, object]:
        """Accept a sample request, and return once it is durable together with its seed."""
        if request.sampling_session_id is None:
            request_id = await self._sample_without_sampler(tenant, request, idempotency_key)
        else:
            assert request.seq_id is not None
            self._state.sampler(tenant, request.sampling_session_id)
            spec, content = await self._build_spec(request), await compute_digest(request)
            sampler = self._state.sampler(tenant, request.sampling_session_id)  # it may have been removed meanwhile
            request_id = format_request_id(sampler.sampler_id, request.seq_id)
            # No await between these checks and the start of the acceptance: of equal requests only one is accepted.
            if (accepting := sampler.accepting.get(request.seq_id)) is not None:
                await asyncio.shield(accepting)
                await self._repetitions.check(request_id, content)
            elif request_id in self._state.pending:
                await self._repetitions.check(request_id, content)
            else:
                await self._sample(sampler, spec, request.seq_id, request_id, content)
        ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, sampler: Sampler, spec: SampleSpec, seq: int, request_id: str, content: bytes) -> None:
        pending = self._build_entry(sampler.tenant, request_id, spec, sampler.folder, content)
        pending.sampler_id = sampler.sampler_id
        self._limits.admit_sample(pending.tenant, pending.tokens)
        await asyncio.shield(start_shared(sampler.accepting, seq, self._add_request(pending)))

    async def _sample_without_sampler(self, tenant: str, request: schemas.AsampleRequest, key: str | None) -> str:
        """Sample from the base model or a checkpoint. A repetition is a new request, unless its key is the same."""
        drawn = hashlib.sha256(f"{tenant}\n{key}".encode()).hexdigest()[:32] if key else secrets.token_hex(16)
        request_id, content = f"sample_{drawn}", await compute_digest(request)
        if request_id in self._state.pending:
            await self._repetitions.check(request_id, content)
            return request_id
        spec, folder = await self._build_spec(request), None
        if request.base_model is not None:
            self._runs.check_base_model(request.base_model)
        if request.model_path is not None:
            folder = (await self._checkpoints.source(tenant, request.model_path, setting="model_path")).folder
        if request_id in self._state.pending:  # the same request may have come while this one was checked
            await self._repetitions.check(request_id, content)
            return request_id
        pending = self._build_entry(tenant, request_id, spec, folder, content)
        self._limits.admit_sample(tenant, pending.tokens)
        await self._add_request(pending)
        return request_id

    async def _build_spec(self, request: schemas.AsampleRequest) -> SampleSpec:
        """Check a request. Raises: RequestError."""
        if request.record_stability_info and not self._records_stability:
            raise RequestError(
                f"record_stability_info is only supported by the loss {STABLE_REINFORCE}: {_LOSS_IS_ELSEWHERE}"
            )
        if request.target_prompt_logprobs is not None and not self._scores_targets:
            raise RequestError(TARGETS_REFUSED)
        if request.num_tokens > THREAD_FROM_TOKENS:
            return await asyncio.to_thread(self._parse_spec, request)
        return self._parse_spec(request)

    def _parse_spec(self, request: schemas.AsampleRequest) -> SampleSpec:
        spec = request.to_spec(draw_seed)
        check_sample(spec, self._facts)
        return spec

    def _build_entry(
        self, tenant: str, request_id: str, spec: SampleSpec, folder: str | None, content: bytes
    ) -> PendingRequest:
        stored = Sample.encode(request_id, tenant, spec, folder)
        tokens = sample_tokens(spec, self._facts.max_context)
        return PendingRequest(request_id, tenant, "sample", stored, content, tokens=tokens)

    async def _add_request(self, pending: PendingRequest) -> None:
        """Insert the request. An existing row means that an earlier process accepted the same request."""
        self._state.pending[pending.request_id] = pending
        self._limits.enter(pending.tenant, pending.tokens)
        try:
            await self._store.write(partial(insert_request, pending=pending))
        except IntegrityError:
            self._remove_request(pending)
            assert pending.content is not None
            await self._repetitions.check(pending.request_id, pending.content)
            return
        except BaseException:
            self._remove_request(pending)
            raise
        await self._dispatch.sample(pending)

    def _remove_request(self, pending: PendingRequest) -> None:
        del self._state.pending[pending.request_id]
        self._limits.leave(pending.tenant, pending.tokens)


def _check_same(sampler: Sampler, request: schemas.CreateSamplingSessionRequest) -> None:
    """Raise RequestError if the sampler of this number was made from other weights."""
    same_model = request.base_model is None or request.base_model == sampler.base_model
    if sampler.ephemeral or sampler.model_path != request.model_path or not same_model:
        weights = sampler.model_path or ("weights without a name" if sampler.ephemeral else sampler.base_model)
        raise RequestError(
            f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is in use by a sampler of "
            f"{weights}: use the next number"
        )


def sample_tokens(spec: SampleSpec, max_context: int) -> int:
    """Return the largest possible number of tokens: prompt and completions."""
    longest = max_context - len(spec.prompt) if spec.params.max_tokens is None else spec.params.max_tokens
    return len(spec.prompt) + spec.num_samples * longest


def _insert_sampler(database: Database, row: SamplerRow) -> None:
    """Insert a sampler, unless it exists."""
    if database.get(SamplerRow, row.sampler_id) is not None:
        return
    session = database.get(SessionRow, row.session_id)
    if session is None or session.ended_at is not None:
        raise RequestError(f"session_id {row.session_id!r} has ended", 404)
    database.add(row)
