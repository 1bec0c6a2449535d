"""Streamed answers of tiny native engines: those of `generate`, token for token, whatever happens on the way."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines import token_stream
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
    TokenDelta,
)
from skyrl_train.inference_engines.engine_handle import EngineHost
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.inline_engine import InlineEngine
from skyrl_train.inference_engines.native import engine as native_engine
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.request import join_deltas

PARAMS = {"max_tokens": 60, "temperature": 1.0, "ignore_eos": True, "logprobs": 2, "seed": [3, 1]}
GRAMMAR = {"constraint": {"lark": "start: /([a-m][n-z]){30}/"}}


class Faulty(NativeInferenceEngine):
    """A native engine without some features, which may die."""

    lacking: tuple[str, ...] = ()
    num_calls = 0
    is_dead = False

    async def describe(self) -> EngineInfo:
        return replace(await super().describe(), unsupported=dict.fromkeys(self.lacking, "not here"))

    async def check_health(self) -> None:
        if self.is_dead:
            raise WorkerError("the engine died")
        await super().check_health()

    async def generate(self, request: GenerationRequest) -> Completion:
        self.num_calls += 1
        return await super().generate(request)

    async def stream(self, request: GenerationRequest, on_tokens: Any) -> Completion:
        if "streaming" in self.lacking:
            return await InferenceEngineInterface.stream(self, request, on_tokens)
        self.num_calls += 1
        return await super().stream(request, on_tokens)

    def die(self) -> None:
        self.is_dead = True
        self._fail_all(WorkerError("the engine died"))


class Streamed:
    """A streamed answer under way."""

    def __init__(self, engine: InferenceEngineInterface, **params: Any):
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.ensure_future(engine.stream(request(**params), self.deltas.append))

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(20):
            while sum(len(delta.token_ids) for delta in self.deltas) < num_tokens:
                assert not self.task.done(), self.task
                await asyncio.sleep(0)

    async def expect(self, whole: Completion, *, fewest: int = 2) -> None:
        """Check that the answer is `whole`, and that it begins with the tokens handed out."""
        completion = await self.task
        assert completion.token_ids == whole.token_ids
        assert completion.log_probs == whole.log_probs
        assert (completion.text, completion.stop_reason) == (whole.text, whole.stop_reason)
        assert len(self.deltas) >= fewest
        if not self.deltas:
            return
        token_ids, log_probs, versions, top = join_deltas(self.deltas)
        num = len(token_ids)
        assert token_ids == whole.token_ids[:num] and log_probs == (whole.log_probs or [])[:num]
        assert versions == completion.weight_versions[:num]
        assert top is not None and whole.top is not None
        np.testing.assert_array_equal(top.ids, whole.top.ids[:num])
        np.testing.assert_array_equal(top.log_probs, whole.top.log_probs[:num])


def request(**params: Any) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=[5, 6, 7], sampling_params=PARAMS | params)


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_engine, "HAND_OUT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def model(chat_model: str) -> str:
    return chat_model


@pytest.fixture
async def client(model: str) -> AsyncIterator[InferenceEngineClient]:
    """Over one engine, which is started again when it dies."""

    async def restart(_: int) -> Faulty:
        return Faulty(model)

    cfg = SkyRLConfig.from_dict({"generator": {"engine_health_interval_seconds": 0}})
    client = InferenceEngineClient([Faulty(model)], AutoTokenizer.from_pretrained(model), cfg, restart)
    yield client
    await client.teardown()


def engine_of(client: InferenceEngineClient) -> Faulty:
    [engine] = client.engines
    assert isinstance(engine, Faulty)
    return engine


async def stop_text(client: InferenceEngineClient, place: int) -> dict[str, Any]:
    """Parameters by which the answer ends behind token `place` + 3, and not before."""
    ids = (await client.generate(request())).token_ids
    text = str(client.tokenizer.decode(ids[place : place + 4]))
    assert str(client.tokenizer.decode(ids)).index(text) == place, "the model has one token a character"
    return {"stop": [text]}


async def test_stream_equals_completion(client: InferenceEngineClient):
    settings: list[dict[str, Any]] = [{}, {"seed": [3, 2]}, await stop_text(client, 20), {"frequency_penalty": 0.5}]
    wholes = [await client.generate(request(**params)) for params in settings]
    streams = [Streamed(client, **params) for params in settings]
    for stream, whole in zip(streams, wholes, strict=True):
        await stream.expect(whole, fewest=10)
    await Streamed(engine_of(client)).expect(wholes[0], fewest=10)
    assert len(wholes[2].token_ids) == 24


async def test_constrained_stream_equals_completion(client: InferenceEngineClient):
    pytest.importorskip("llguidance", reason="the extra constrained is not installed")
    await Streamed(client, **GRAMMAR).expect(await client.generate(request(**GRAMMAR)), fewest=10)


@pytest.mark.first_case
@pytest.mark.parametrize("place", [None, 8])
async def test_stream_continues_after_weight_sync(client: InferenceEngineClient, place: int | None):
    """An interruption within the stop text of the second case: no token behind its end is handed out."""
    params = {} if place is None else await stop_text(client, place)
    whole, engine = await client.generate(request(**params)), engine_of(client)
    stream = Streamed(client, **params)
    await stream.until(10)
    await client.pause_generation("abort")
    await engine._run_command(lambda: engine._core.update_version(4))  # new weights, with the same numbers
    await client.resume_generation()
    await stream.expect(whole)
    versions = set(stream.task.result().weight_versions)
    assert versions == {0, 4} or (place is not None and versions == {0})


async def test_stream_continues_after_engine_crash(client: InferenceEngineClient):
    whole, first = await client.generate(request()), engine_of(client)
    stream = Streamed(client)
    await stream.until(10)
    first.die()
    await stream.expect(whole)
    assert engine_of(client) is not first and client.take_metrics()["engines/continued_requests"] == 1


async def test_aborted_stream_returns_streamed_tokens(client: InferenceEngineClient):
    whole = await client.generate(request())
    stream = Streamed(client)
    await stream.until(10)
    await client.abort_generation()
    output = await stream.task
    ids = output.token_ids
    assert output.stop_reason == "abort" and 10 <= len(ids) < 60
    assert ids == whole.token_ids[: len(ids)]
    assert ids[:10] == join_deltas(stream.deltas).token_ids[:10]


@pytest.mark.parametrize("place", [None, 14])
async def test_non_streaming_engine_is_called_in_pieces(
    client: InferenceEngineClient, monkeypatch: pytest.MonkeyPatch, place: int | None
):
    """The first piece ends behind token 16, within the stop text of the second case."""
    monkeypatch.setattr(token_stream, "LARGEST_PIECE", 20)
    monkeypatch.setattr(Faulty, "lacking", ("streaming",))
    params = {} if place is None else await stop_text(client, place)
    whole = await client.generate(request(**params))
    engine_of(client).num_calls = 0
    stream = Streamed(client, **params)
    await stream.expect(whole, fewest=1)
    assert [len(delta.token_ids) for delta in stream.deltas] == ([16, 20, 20] if place is None else [16])
    assert engine_of(client).num_calls == (4 if place is None else 2)
    assert client.take_metrics()["engines/continued_requests"] == 0


async def test_tokens_are_held_when_interruption_restarts_completion(
    client: InferenceEngineClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Faulty, "lacking", ("answer_tokens",))
    params = {"frequency_penalty": 0.5}
    whole = await client.generate(request(**params))
    stream = Streamed(client, **params)
    async with asyncio.timeout(20):
        while engine_of(client)._core.num_running == 0:
            await asyncio.sleep(0.001)
    await client.pause_generation("abort")
    await client.resume_generation()
    await stream.expect(whole, fewest=0)
    assert not stream.deltas


async def test_tokens_are_held_when_kept_tokens_are_returned(client: InferenceEngineClient):
    params = {"return_kept_tokens": True, "top_k": 5, "logprobs": 0}
    whole, first = await client.generate(request(**params)), engine_of(client)
    stream = Streamed(client, **params)
    async with asyncio.timeout(20):
        while first._core.num_running == 0:
            await asyncio.sleep(0.001)
    first.die()
    await stream.expect(whole, fewest=0)
    assert whole.kept_tokens is not None and stream.task.result().kept_tokens == whole.kept_tokens
    assert not stream.deltas


class Shouting(NativeInferenceEngine):
    """Changes answers and says nothing of streams."""

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, text=completion.text.upper())


async def test_stream_equals_overridden_generate(model: str):
    engine = Shouting(model)
    try:
        await Streamed(engine).expect(await engine.generate(request()), fewest=0)
    finally:
        await engine.teardown()


async def test_paused_engine_has_streamed_all_tokens(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_engine, "HAND_OUT_SECONDS", 1e9)
    engine = Faulty(model)
    try:
        stream = Streamed(engine, max_tokens=200)
        await stream.until(1)
        while engine.progress() < 20:
            await asyncio.sleep(0)
        await engine.pause_generation("keep")
        rows = engine._core._rows
        async with asyncio.timeout(20):
            while sum(len(delta.token_ids) for delta in stream.deltas) < rows.length[0] - rows.prompt_length[0]:
                await asyncio.sleep(0.001)
        assert len(stream.deltas) == 2
        await engine.resume_generation()
        assert len((await stream.task).token_ids) == 200
    finally:
        await engine.teardown()


async def test_cancelling_inline_stream_ends_request(model: str):
    """In the loop of the engine, from that of the caller."""
    host: Future[EngineHost] = Future()
    host.set_result(EngineHost(lambda: Faulty(model)))
    engine = InlineEngine(host, "engine 0", "no log", 60.0)
    try:
        whole = await engine.generate(request())
        streams = [Streamed(engine) for _ in range(3)]
        await streams[0].until(5)
        streams[0].task.cancel()
        for stream in streams[1:]:
            await stream.expect(whole, fewest=5)
        core: Any = host.result()._engine
        deadline = time.monotonic() + 20
        while core._core.num_running:
            assert time.monotonic() < deadline, "the cancelled stream goes on in the engine"
            await asyncio.sleep(0.001)
        seen = len(streams[0].deltas)
        await engine.generate(request())
        assert len(streams[0].deltas) <= seen + 1 and engine.progress() == 4
    finally:
        await engine.teardown()
