"""Models under training: creation, description, unloading."""

import secrets
import time
from functools import partial

import msgspec
from sqlmodel import Session as Database

from tx.errors import RequestError
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.commands import CreateModel
from tx.tinker.config import EngineConfig
from tx.tinker.service.checkpoints import Checkpoints
from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.engine_link import EngineLink
from tx.tinker.service.intake import RequestIntake
from tx.tinker.service.limits import Limits
from tx.tinker.service.repetitions import compute_digest
from tx.tinker.service.rows import insert_request
from tx.tinker.service.state import PendingRequest, Run, ServerState
from tx.tinker.storage.db_models import ModelRow
from tx.tinker.storage.store import Store
from tx.tinker.types import LoraSpec, format_model_id, format_request_id
from tx.tinker.wire import schemas
from tx.tinker.wire.checks import check_lora

BACKEND_PATIENCE_SECONDS = 30.0
"""Longest wait for the backend's limits; after it a model is accepted, and the engine checks it."""


def draw_seed() -> int:
    """Draw a random seed of 31 bits."""
    return secrets.randbits(31)


class Runs:
    """Creation, description and unloading of models."""

    def __init__(
        self,
        config: EngineConfig,
        facts: BaseModelFacts,
        store: Store,
        state: ServerState,
        limits: Limits,
        intake: RequestIntake,
        dispatch: Dispatch,
        link: EngineLink,
        checkpoints: Checkpoints,
    ):
        self._config, self._facts, self._store, self._state, self._limits = config, facts, store, state, limits
        self._intake, self._dispatch, self._link, self._checkpoints = intake, dispatch, link, checkpoints

    async def create(self, tenant: str, request: schemas.CreateModelRequest) -> dict[str, str]:
        """Create a model with a new adapter."""
        model_id = format_model_id(request.session_id, request.model_seq_id)
        if await self._is_repeated(tenant, model_id, request):
            return _build_accepted(model_id)
        self._state.session(tenant, request.session_id)
        self.check_base_model(request.base_model)
        lora = (request.lora_config or schemas.LoraConfig()).to_spec(draw_seed)
        lora = msgspec.structs.replace(lora, share_experts=self._config.share_expert_matrices)
        await self._check_lora(lora)
        row = self._build_row(tenant, request.session_id, request.model_seq_id, request.base_model, lora)
        row.user_metadata = request.user_metadata
        return await self._create(request, row, lora)

    async def create_from_checkpoint(self, tenant: str, request: schemas.LoadWeightsRequest) -> dict[str, str]:
        """Create a model with the adapter of a checkpoint."""
        assert request.session_id is not None and request.model_seq_id is not None
        model_id = format_model_id(request.session_id, request.model_seq_id)
        if await self._is_repeated(tenant, model_id, request):
            return _build_accepted(model_id)
        self._state.session(tenant, request.session_id)
        if request.base_model is not None:
            self.check_base_model(request.base_model)
        source = await self._checkpoints.source(tenant, request.path, optimizer=request.optimizer)
        await self._check_lora(source.lora)
        row = self._build_row(
            tenant, request.session_id, request.model_seq_id, request.base_model or source.base_model, source.lora
        )
        row.user_metadata, row.origin = request.user_metadata, request.path
        return await self._create(request, row, source.lora, source.folder)

    async def get_info(self, tenant: str, model_id: str) -> dict[str, object]:
        """Describe a model. Raises: RequestError 404."""
        run = self._state.runs.get(model_id)
        if run is not None and run.tenant == tenant:
            base_model, rank = run.base_model, run.lora.rank
        else:
            row = await self._get_row(tenant, model_id)
            base_model, rank = row.base_model, row.lora_rank
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {
                "arch": self._facts.architecture,
                "model_name": base_model,
                "tokenizer_id": self._facts.tokenizer_id,
            },
            "is_lora": True,
            "lora_rank": rank,
            "model_name": base_model,
        }

    async def unload(self, tenant: str, model_id: str) -> dict[str, str]:
        """Unload a model after its accepted requests."""
        run = self._state.runs.get(model_id)
        if run is not None and run.tenant == tenant:
            await self._intake.unload(run)
        elif (await self._get_row(tenant, model_id)).status != "unloaded":
            raise RequestError(f"model_id {model_id!r} is not a live model: its creation failed", 404)
        return {"request_id": format_request_id(model_id, "unload"), "model_id": model_id}

    def check_base_model(self, name: str) -> None:
        """Check that a base model is served. Raises: RequestError."""
        if name not in self._config.served_names:
            raise RequestError(
                f"base_model must be {' or '.join(map(repr, self._config.served_names))}, which is served here; "
                f"got {name[:200]!r}"
            )

    # ---- making

    async def _check_lora(self, lora: LoraSpec) -> None:
        info = await self._link.wait_for_info(BACKEND_PATIENCE_SECONDS)
        if info is None:
            return
        check_lora(lora, info.max_lora_rank, info.can_train_unembed)
        if lora.train_unembed and not info.can_train_unembed:
            raise RequestError(
                f"lora_config.train_unembed must be false: the backend {info.name} does not train the output layer of "
                f"{self._facts.name}"
            )

    async def _create(
        self,
        request: schemas.CreateModelRequest | schemas.LoadWeightsRequest,
        row: ModelRow,
        lora: LoraSpec,
        folder: str | None = None,
    ) -> dict[str, str]:
        run = self._state.runs.get(row.model_id)  # the same request may have come while this one was checked
        content = await compute_digest(request)
        if run is None:
            self._state.session(row.tenant, row.session_id)  # it may have ended meanwhile
            self._check_number_of_models(row.tenant)
            self._limits.admit_training(row.tenant)
            run = self._state.runs[row.model_id] = Run(row.model_id, row.tenant, row.session_id, row.base_model, lora)
            stored = CreateModel.encode(request, row.tenant, row.model_id, lora, folder)
            await self._intake.create(run, stored, partial(_insert_model, row), content)
        else:
            await self._intake.created(run)
            await self._intake.repetitions.check(format_request_id(row.model_id, 0), content)
        return _build_accepted(row.model_id)

    def _check_number_of_models(self, tenant: str) -> None:
        most = self._config.max_models_per_tenant
        number = sum(run.tenant == tenant for run in self._state.runs.values())
        if most is not None and number >= most:
            raise RequestError(
                f"{number} models of this key are live and the maximum is {most} (max_models_per_tenant of the "
                "server): unload one, or end its session"
            )

    async def _is_repeated(
        self, tenant: str, model_id: str, request: schemas.CreateModelRequest | schemas.LoadWeightsRequest
    ) -> bool:
        """Return True if this request was accepted before.

        Raises:
            RequestError: a different request was.
        """
        run = self._state.runs.get(model_id)
        if run is not None and run.tenant == tenant:
            await self._intake.created(run)
        else:
            row = await self._store.read(lambda database: database.get(ModelRow, model_id))
            if row is None or row.tenant != tenant:
                return False
        await self._intake.repetitions.check(format_request_id(model_id, 0), await compute_digest(request))
        return True

    async def _get_row(self, tenant: str, model_id: str) -> ModelRow:
        row = await self._store.read(lambda database: database.get(ModelRow, model_id))
        if row is None or row.tenant != tenant:
            raise RequestError(f"model_id {model_id!r} is unknown", 404)
        return row

    def _build_row(self, tenant: str, session_id: str, model_seq_id: int, base_model: str, lora: LoraSpec) -> ModelRow:
        now = time.time()
        return ModelRow(
            model_id=format_model_id(session_id, model_seq_id),
            tenant=tenant,
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model=base_model,
            lora_rank=lora.rank,
            lora_seed=lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            share_experts=lora.share_experts,
            status="live",
            created_at=now,
            last_request_at=now,
        )


def _build_accepted(model_id: str) -> dict[str, str]:
    return {"request_id": format_request_id(model_id, 0), "model_id": model_id}


def _insert_model(row: ModelRow, database: Database, pending: PendingRequest) -> None:
    database.add(row)
    database.flush()
    insert_request(database, pending)
