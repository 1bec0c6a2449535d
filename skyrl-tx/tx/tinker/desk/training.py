"""What is asked of a model: passes, optimizer steps, saving and loading. Each becomes an order for the engine."""

import asyncio
from typing import Any

import orjson

from tx.errors import RequestError
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.desk.checkpoints import Checkpoints
from tx.tinker.desk.live import Live, Run, sampler_id_of
from tx.tinker.desk.orders import Orders, Prepared
from tx.tinker.desk.records import Record, SaveEffect
from tx.tinker.desk.settling import INLINE_BYTES
from tx.tinker.engine.messages import Load, Optimize, Save, Train
from tx.tinker.storage.db_models import CheckpointRow, SamplerRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store
from tx.tinker.types import TinkerPath, checkpoint_name
from tx.tinker.wire import schemas
from tx.tinker.wire.checks import check_adam, check_training
from tx.tinker.wire.codec import TrainingRequest

LARGE_BYTES = 256 << 10
"""Requests from here on are checked in a thread: others do not wait for it."""


class Training:
    def __init__(
        self,
        facts: BaseModelFacts,
        store: Store,
        folders: Folders,
        live: Live,
        orders: Orders,
        checkpoints: Checkpoints,
    ):
        self._facts, self._store, self._folders, self._live = facts, store, folders, live
        self._orders, self._checkpoints = orders, checkpoints

    async def train(self, tenant: str, request: TrainingRequest, payload: bytes) -> dict[str, str]:
        """A forward or forward-backward pass.

        Args:
            payload: the request as canonical protobuf
        """

        async def prepare(run: Run, request_id: str) -> Prepared:
            if len(payload) < LARGE_BYTES:
                check_training(request, self._facts)
            else:
                await asyncio.to_thread(check_training, request, self._facts)
            inline = len(payload) <= INLINE_BYTES
            order = Train(**_address(run, request.seq, request_id), payload=payload if inline else b"")
            kind = "forward" if request.forward_only else "train"
            return Prepared(kind, Record(order=order), None if inline else payload)

        return await self._orders.accept(tenant, request.model_id, request.seq, prepare)

    async def optim_step(self, tenant: str, request: schemas.OptimStepRequest) -> dict[str, str]:
        async def prepare(run: Run, request_id: str) -> Prepared:
            adam = request.adam_params.to_params()
            check_adam(adam)
            order = Optimize(**_address(run, request.seq_id, request_id), adam=adam)
            return Prepared("optimize", Record(order=order))

        return await self._orders.accept(tenant, request.model_id, request.seq_id, prepare)

    async def save_weights(self, tenant: str, request: schemas.SaveWeightsRequest) -> dict[str, str]:
        async def prepare(run: Run, request_id: str) -> Prepared:
            effect = SaveEffect(
                kind="weights",
                name=checkpoint_name(request.path) if request.path is not None else f"step-{request.seq_id}",
                overwrite=request.overwrite,
                ttl_seconds=request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return await self._save(run, request_id, request.seq_id, effect, "save_weights")

        return await self._orders.accept(tenant, request.model_id, request.seq_id, prepare)

    async def save_for_sampler(self, tenant: str, request: schemas.SaveWeightsForSamplerRequest) -> dict[str, str]:
        async def prepare(run: Run, request_id: str) -> Prepared:
            effect = SaveEffect(
                kind="sampler_weights",
                name=checkpoint_name(request.path) if request.path is not None else None,
                ttl_seconds=request.ttl_seconds,
                user_metadata=request.user_metadata,
                sampling_session_seq_id=request.sampling_session_seq_id,
            )
            return await self._save(run, request_id, request.seq_id, effect, "save_weights_for_sampler")

        return await self._orders.accept(tenant, request.model_id, request.seq_id, prepare)

    async def load_in_place(self, tenant: str, request: schemas.LoadWeightsRequest) -> dict[str, str]:
        assert request.model_id is not None and request.seq_id is not None
        seq = request.seq_id

        async def prepare(run: Run, request_id: str) -> Prepared:
            source = await self._checkpoints.source(
                tenant, request.path, optimizer=request.optimizer, waiting_for=run.model_id
            )
            if source.lora.rank != run.lora.rank:
                raise RequestError(
                    f"path: the checkpoint's rank must be {run.lora.rank}, that of model {run.model_id}; "
                    f"got {source.lora.rank}"
                )
            order = Load(**_address(run, seq, request_id), folder=source.folder, optimizer=request.optimizer)
            answer = {"path": request.path, "model_id": run.model_id, "type": "load_weights"}
            return Prepared("load", Record(order=order, answer=orjson.dumps(answer)))

        return await self._orders.accept(tenant, request.model_id, seq, prepare)

    async def _save(self, run: Run, request_id: str, seq: int, effect: SaveEffect, answer_type: str) -> Prepared:
        """Its folder is this request's alone, so doing it again after a crash harms nobody."""
        answer: dict[str, Any] = {"type": answer_type}
        if effect.sampling_session_seq_id is not None:
            answer["sampling_session_id"] = await self._free_sampler(run, effect.sampling_session_seq_id)
        if effect.name is not None:
            await self._check_name(run, effect)
            folder = self._folders.place(run.model_id, effect.kind, f"{effect.name[:200]}@{seq}")
            answer["path"] = str(TinkerPath(run.model_id, effect.kind, effect.name))
        else:
            folder = self._folders.place(run.model_id, "samplers", f"{effect.sampling_session_seq_id}@{seq}")
        order = Save(**_address(run, seq, request_id), folder=folder, state=effect.kind == "weights")
        return Prepared("save", Record(order=order, answer=orjson.dumps(answer), save=effect))

    async def _check_name(self, run: Run, effect: SaveEffect) -> None:
        """Raises RequestError if the name is taken, or will be."""
        assert effect.name is not None
        key = (run.model_id, effect.kind, effect.name)
        if effect.overwrite:
            return
        row = await self._store.read(lambda database: database.get(CheckpointRow, key))
        if row is not None or (effect.kind, effect.name) in run.saving:
            fix = "give another path, or overwrite=true" if effect.kind == "weights" else "give another path"
            raise RequestError(f"path: the checkpoint {TinkerPath(*key)!s} exists already; {fix}")

    async def _free_sampler(self, run: Run, number: int) -> str:
        sampler_id = sampler_id_of(run.session_id, number)
        row = await self._store.read(lambda database: database.get(SamplerRow, sampler_id))
        if row is not None or sampler_id in self._live.promised_samplers:
            raise RequestError(f"sampling_session_seq_id {number} of this session is taken: give the next number")
        return sampler_id


def _address(run: Run, seq: int, request_id: str) -> dict[str, Any]:
    return {"request_id": request_id, "tenant": run.tenant, "model_id": run.model_id, "seq": seq}
