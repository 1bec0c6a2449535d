"""Engines in Ray processes that are killed, stopped and slowed down: no request is lost, answered twice or changed."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import (
    Completion,
    GenerationRequest,
    InferenceEngineInput,
)
from skyrl_train.inference_engines.health import Health
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayWrappedInferenceEngine, build_engine_actor

pytestmark = pytest.mark.slow

PROMPTS = [[5 + i % 7, 6, 7 + i] for i in range(12)]
PARAMS = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}


def make_engine_of(model: str, seconds_a_step: float, seconds_of_first_prompt: float) -> Callable[[], Any]:
    """Make the constructor of a native engine with a child process, in which every step (or first prompt) takes at
    least so long.
    """

    def make() -> Any:
        import subprocess
        import time

        from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

        engine: Any = NativeInferenceEngine(model)
        step = engine._core.step
        prefill = engine._core._runner.prefill
        seconds_left = [seconds_of_first_prompt]

        def slow_step(**kwargs: Any) -> Any:
            time.sleep(seconds_a_step)
            return step(**kwargs)

        def slow_prefill(*args: Any) -> Any:
            time.sleep(seconds_left.pop() if seconds_left else 0)
            return prefill(*args)

        engine._core.step, engine._core._runner.prefill = slow_step, slow_prefill
        engine.child = subprocess.Popen(["sleep", "1000"])
        return engine

    return make


class Engines:
    """Starts engines and counts how often each prompt was answered, by any of them."""

    def __init__(self, model: str, folder: Path, seconds_a_step: list[float], seconds_of_first_prompt: float):
        self._model, self._folder = model, folder
        self._seconds_a_step, self._first_prompt = seconds_a_step, seconds_of_first_prompt
        self.num_starts = 0
        self.answered: Counter[tuple[int, ...]] = Counter()

    async def start(self, index: int) -> RayWrappedInferenceEngine:

        engines = self

        class Counted(RayWrappedInferenceEngine):
            async def generate(self, request: GenerationRequest) -> Completion:
                completion = await super().generate(request)
                if completion.stop_reason != "abort":
                    engines.answered[tuple(request.prompt_token_ids[:3])] += 1
                return completion

        self.num_starts += 1
        log_file = str(self._folder / f"engine_{index}_{self.num_starts}.log")
        make = make_engine_of(self._model, self._seconds_a_step[index], self._first_prompt)
        actor = build_engine_actor(num_cpus=1, max_concurrency=1000).remote(make, log_file)
        return Counted(actor, f"engine {index}", log_file, 300, 300, 300)


Start = Callable[..., AbstractAsyncContextManager[tuple[InferenceEngineClient, Engines]]]


@pytest.fixture
def start(ray_cpu: None, chat_model: str, tmp_path: Path) -> Start:
    """`async with start(seconds_a_step=[...], **settings) as (client, engines)`."""

    @asynccontextmanager
    async def start(
        seconds_a_step: list[float], seconds_of_first_prompt: float = 0.0, **settings: Any
    ) -> AsyncIterator[tuple[InferenceEngineClient, Engines]]:
        given = {"engine_health_interval_seconds": 2.0, "request_timeout_seconds": 200.0} | settings
        engines = Engines(chat_model, tmp_path, seconds_a_step, seconds_of_first_prompt)
        first = [await engines.start(index) for index in range(len(seconds_a_step))]
        cfg = SkyRLConfig.from_dict({"generator": given})
        client = InferenceEngineClient(first, AutoTokenizer.from_pretrained(chat_model), cfg, engines.start)
        await client.wait_until_healthy()
        try:
            yield client, engines
        finally:
            await client.teardown()

    return start


def batch(prompts: list[list[int]] = PROMPTS, params: dict[str, Any] = PARAMS, **more: Any) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, **more)


def pid(client: InferenceEngineClient, index: int) -> int:
    return client.engines[index].pid()  # type: ignore[attr-defined]


def assert_each_answered_once(engines: Engines, num_times: int = 1) -> None:
    assert engines.answered == {tuple(prompt): num_times for prompt in PROMPTS}


async def test_outputs_unchanged_when_engine_is_killed_while_generating(start: Start):
    async with start([0.03, 0.03]) as (client, engines):
        undisturbed = await client.generate_batch(batch())
        engines.answered.clear()
        victim, children = pid(client, 1), psutil.Process(pid(client, 1)).children(recursive=True)
        assert children
        answers = asyncio.create_task(client.generate_batch(batch()))
        await asyncio.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        assert await answers == undisturbed
        assert_each_answered_once(engines)
        assert await client.wait_until_healthy()
        assert pid(client, 1) != victim
        assert not any(child.is_running() for child in children), "what it had started is gone before another starts"
        metrics = client.take_metrics()
        assert metrics | {"engines/deaths": 1, "engines/restarts": 1, "engines/continued_requests": 6} == metrics
        assert await client.generate_batch(batch()) == undisturbed
        processes = [pid(client, index) for index in (0, 1)]
    assert not any(map(psutil.pid_exists, processes)), "they end with the client"


@pytest.mark.full
async def test_outputs_unchanged_when_engine_is_killed_while_paused(start: Start):
    async with start([0.03, 0.03]) as (client, engines):
        undisturbed = await client.generate_batch(batch())
        for mode in ("keep", "abort"):
            engines.answered.clear()
            answers = asyncio.create_task(client.generate_batch(batch()))
            await asyncio.sleep(0.5)
            await client.pause_generation(mode)
            os.kill(pid(client, 0), signal.SIGKILL)
            assert await client.wait_until_healthy()
            assert not answers.done()
            await client.resume_generation()
            assert await answers == undisturbed
            assert_each_answered_once(engines)


@pytest.mark.full
async def test_stopped_engine_is_replaced(start: Start):
    async with start([0.03, 0.03]) as (client, engines):
        undisturbed = await client.generate_batch(batch())
        engines.answered.clear()
        victim = pid(client, 0)
        answers = asyncio.create_task(client.generate_batch(batch()))
        await asyncio.sleep(0.5)
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(
            WorkerError,
            match=r"(?s)engine 0 .*=== process \d+ start",
        ):
            await client.pause_generation()
        assert time.monotonic() - began < 40
        await client.wait_until_healthy()
        await client.resume_generation()
        assert await answers == undisturbed
        assert_each_answered_once(engines)
        assert not psutil.pid_exists(victim)


@pytest.mark.full
async def test_engine_in_long_prefill_is_not_replaced(start: Start):
    async with start([0.0], seconds_of_first_prompt=5.0, engine_health_interval_seconds=1.2) as (client, _):
        began = time.monotonic()
        await client.generate_batch(batch(PROMPTS[:1]))
        assert time.monotonic() - began > 5
        assert client.take_metrics()["engines/deaths"] == 0


@pytest.mark.full
async def test_outputs_unchanged_under_repeated_engine_crashes(start: Start):
    """Each time others: every answer is that of an undisturbed run, and none is given twice."""
    async with start([0.03, 0.03, 0.03], max_engine_restarts=9, max_requests_per_engine=3) as (client, engines):
        undisturbed = await client.generate_batch(batch())
        engines.answered.clear()

        async def kill_now_and_then() -> None:
            for number in range(5):
                await asyncio.sleep(1.0)
                healthy = [i for i in range(3) if i in client._supervisor.get_engines_with_health(Health.HEALTHY)]
                if healthy:
                    os.kill(pid(client, healthy[number % len(healthy)]), signal.SIGKILL)

        killing = asyncio.create_task(kill_now_and_then())
        rows = [
            asyncio.create_task(client.generate_batch(batch([p], PARAMS | {"seed": [[3, i]]})))
            for i, p in enumerate(PROMPTS)
        ]
        answers = [await row for row in rows]
        await killing
        for i, answer in enumerate(answers):
            assert answer["response_ids"] == [undisturbed["response_ids"][i]]
            assert answer["response_logprobs"] == [(undisturbed["response_logprobs"] or [])[i]]
        assert_each_answered_once(engines)
        await client.wait_until_healthy()
        assert client.take_metrics()["engines/restarts"] >= 3
