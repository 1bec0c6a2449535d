"""A service with real storage, its users, and an engine that is a process whose models are chains of hashes."""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_engine import chained, digest
from stores import service_of

from tx.errors import RequestError
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.commands import Load, Optimize, Save, Train
from tx.tinker.config import EngineConfig
from tx.tinker.service.engine_link import EngineTimeouts
from tx.tinker.service.results import StoredResult
from tx.tinker.service.service import TinkerService
from tx.tinker.types import Datum
from tx.tinker.wire import schemas
from tx.tinker.wire.codec import TrainingRequest, encode_training

ENGINE = Path(__file__).with_name("scripted_engine.py")
TIMEOUTS = EngineTimeouts(start=30, silence=2.0, stop=3, first_delay=0.02, longest_delay=0.2)


def scripted(state: Path, commands_per_snapshot: int = 3, seconds: float = 0.0) -> Callable[[str], list[str]]:
    def command(address: str) -> list[str]:
        options = [address, str(state / "snapshots"), str(os.getpid()), str(commands_per_snapshot), str(seconds)]
        return [sys.executable, str(ENGINE), *options]

    return command


def make_service(
    folder: Path,
    command: Callable[[str], list[str]] | None = None,
    timeouts: EngineTimeouts = TIMEOUTS,
    **settings: Any,
) -> TinkerService:
    settings = {"standby_engine": False} | settings  # a process for each test
    config = EngineConfig(
        base_model="tiny", served_model_name=["alias"], state_dir=folder / "state",
        checkpoints_base=str(folder / "checkpoints"), **settings,
    )  # fmt: skip
    facts = BaseModelFacts(
        name="tiny", folder=folder, vocab_size=100, max_context=64, architecture="Tiny", tied_embeddings=False,
        tokenizer_id=None,
    )  # fmt: skip
    return service_of(config, facts, command=command or scripted(config.state_folder), timeouts=timeouts)


class Client:
    """A user of one tenant, who calls as the SDK does."""

    def __init__(self, service: TinkerService, tenant: str = "alice"):
        self.service, self.tenant, self.session_id = service, tenant, ""

    async def begin(self) -> "Client":
        answer = await self.service.sessions.create(self.tenant, schemas.CreateSessionRequest(tags=[]))
        self.session_id = answer["session_id"]
        return self

    async def model(self, number: int = 0, **lora: Any) -> str:
        request = schemas.CreateModelRequest(
            session_id=self.session_id,
            model_seq_id=number,
            base_model="tiny",
            lora_config=schemas.LoraConfig(**{"rank": 8, "seed": 7} | lora),
        )
        answer = await self.service.models.create(self.tenant, request)
        assert (await self.result(answer))["model_id"] == answer["model_id"]
        return answer["model_id"]

    async def train(self, model: str, seq: int, *, forward: bool = False, length: int = 4, copies: int = 1) -> dict:
        request = pass_of(model, seq, forward=forward, length=length, copies=copies)
        return await self.submit_pass(request)

    async def submit_pass(self, request: TrainingRequest) -> dict:
        request = dataclasses.replace(request, payload=encode_training(request))
        return await self.service.intake.submit(self.tenant, Train, request)

    async def step(self, model: str, seq: int, learning_rate: float = 1e-4) -> dict:
        adam = schemas.Adam(learning_rate=learning_rate)
        return await self.service.intake.submit(
            self.tenant, Optimize, schemas.OptimStepRequest(model_id=model, seq_id=seq, adam_params=adam)
        )

    async def save(self, model: str, seq: int, name: str, **more: Any) -> dict:
        request = schemas.SaveWeightsRequest(model_id=model, seq_id=seq, path=name, **more)
        return await self.service.intake.submit(self.tenant, Save, request)

    async def save_sampler(self, model: str, seq: int, **more: Any) -> dict:
        request = schemas.SaveWeightsForSamplerRequest(model_id=model, seq_id=seq, **more)
        return await self.service.intake.submit(self.tenant, Save, request)

    async def load(self, model: str, seq: int, path: str, optimizer: bool = False) -> dict:
        request = schemas.LoadWeightsRequest(model_id=model, seq_id=seq, path=path, optimizer=optimizer)
        return await self.service.intake.submit(self.tenant, Load, request)

    async def model_from(self, path: str, number: int, optimizer: bool = True) -> dict:
        request = schemas.LoadWeightsRequest(
            session_id=self.session_id, model_seq_id=number, path=path, optimizer=optimizer
        )
        return await self.service.models.create_from_checkpoint(self.tenant, request)

    async def sampler(self, number: int, **source: Any) -> str:
        request = schemas.CreateSamplingSessionRequest(
            session_id=self.session_id, sampling_session_seq_id=number, **source
        )
        return (await self.service.sampling.create_sampler(self.tenant, request))["sampling_session_id"]

    async def sample(self, sampler: str | None, seq: int | None = None, **more: Any) -> dict:
        return await self.service.sampling.asample(self.tenant, sample_of(sampler, seq, **more))

    async def stored(self, answer: dict | str, timeout: float = 20.0) -> StoredResult:
        request_id = answer if isinstance(answer, str) else answer["request_id"]
        stored = await self.service.futures.retrieve(self.tenant, request_id, timeout)
        assert isinstance(stored, StoredResult), f"{request_id} is not done after {timeout} s: {stored}"
        return stored

    async def result(self, answer: dict | str) -> dict:
        stored = await self.stored(answer)
        assert stored.body is not None, stored
        return json.loads(stored.body)


def sample_of(sampler: str | None, seq: int | None = None, **more: Any) -> schemas.AsampleRequest:
    settings = {"max_tokens": 8} | more.pop("params", {})
    return schemas.AsampleRequest(
        prompt=schemas.ModelInput(chunks=[schemas.Chunk(tokens=more.pop("prompt", [1, 2, 3]))]),
        sampling_params=schemas.SamplingParams(**settings),
        sampling_session_id=sampler,
        seq_id=seq,
        **more,
    )


def pass_of(model: str, seq: int, *, forward: bool = False, length: int = 4, copies: int = 1) -> TrainingRequest:
    tokens = np.arange(length, dtype=np.int64) + seq % 30
    inputs = {"target_tokens": tokens + 1, "weights": np.ones(length, np.float32)}
    data = [Datum(tokens=tokens, inputs=inputs)] * copies
    return TrainingRequest(model, seq, data, "cross_entropy", {}, forward)


class Chain:
    """Expected state of a model of the scripted engine, computed by hand."""

    def __init__(self, model: str, rank: int = 8, seed: int = 7):
        self.model, self.state = model, chained("new", rank, seed)

    def train(self, seq: int, **more: Any) -> "Chain":
        self.state = chained(self.state, seq, digest(pass_of(self.model, seq, **more)))
        return self

    def step(self, seq: int, learning_rate: float = 1e-4) -> "Chain":
        self.state = chained(self.state, seq, learning_rate)
        return self

    def failed(self, seq: int) -> "Chain":
        self.state = chained(self.state, seq, "failed")
        return self


async def wait_until(fact, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not fact():
            await asyncio.sleep(0.01)


async def refused(status: int, asked: Awaitable[object], says: str | None = None) -> None:
    with pytest.raises(RequestError, match=says) as error:
        await asked
    assert error.value.status == status, error.value


async def without_engine(service: TinkerService) -> None:
    """Make later requests wait, as if the engine were absent. (An engine that is starting would come back.)"""
    await wait_until(lambda: service.link.ready)
    service.link.ready = False


@asynccontextmanager
async def running(folder: Path, **settings: Any):
    service = make_service(folder, **settings)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def restarted(user: Client, folder: Path, **settings: Any):
    """Close a user's service, and run another one over the same folder."""
    await user.service.close()
    async with running(folder, **settings) as user.service:
        yield user.service
