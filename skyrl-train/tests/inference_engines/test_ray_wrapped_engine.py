"""A native engine in a Ray process with more requests than calls that it takes at a time."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import GenerationRequest, InferenceEngineInput, TokenDelta
from skyrl_train.inference_engines.ray_wrapped_inference_engine import RayWrappedInferenceEngine, build_engine_actor
from skyrl_train.inference_engines.request import join_deltas

pytestmark = pytest.mark.slow

CALLS_AT_A_TIME = 2
LONG = {"max_tokens": 200, "ignore_eos": True, "seed": 1, "logprobs": 0}
BATCH = InferenceEngineInput(
    prompt_token_ids=[[5, 6, 7]], sampling_params={"max_tokens": 3, "ignore_eos": True, "seed": 1}
)


class Stoppable(Protocol):
    async def num_requests(self) -> int: ...

    async def occupy(self, seconds: float, counts: bool) -> None: ...


def engine_maker(model: str) -> Callable[[], Any]:
    def make() -> Any:
        import time

        from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

        class StoppableEngine(NativeInferenceEngine):
            """Can be given a long step: its thread sleeps, and counts as progress or does not."""

            counts = False

            def progress(self) -> int:
                return time.monotonic_ns() if self.counts else super().progress()

            async def num_requests(self) -> int:
                return self._core.num_running + self._core.num_waiting

            async def occupy(self, seconds: float, counts: bool) -> None:
                self.counts = counts
                self._mailbox.post(lambda: time.sleep(seconds))

        return StoppableEngine(model)

    return make


async def test_control_calls_bypass_request_queue(ray_cpu: None, chat_model: str, tmp_path: Path):
    log_file = str(tmp_path / "engine.log")
    actor = build_engine_actor(num_cpus=0, max_concurrency=CALLS_AT_A_TIME).remote(engine_maker(chat_model), log_file)
    engine = RayWrappedInferenceEngine(actor, "engine 0", log_file, 300, 300, 300)
    try:
        await engine.pause_generation("keep")
        requests = [asyncio.create_task(engine.generate_batch(BATCH)) for _ in range(5 * CALLS_AT_A_TIME)]
        async with asyncio.timeout(60):  # the requests wait for the resume, so nothing queued behind them would come
            await engine.check_health()
            assert await engine.weight_version() == 0
            await engine.resume_generation()
            outputs = await asyncio.gather(*requests)
        assert [len(ids) for output in outputs for ids in output["response_ids"]] == [3] * len(requests)
        assert engine.progress() == len(requests)

        bad = BATCH | {"prompt_token_ids": [[10**6]]}  # of one tick: the error is that of one request
        refused, output = await asyncio.gather(
            engine.generate_batch(bad), engine.generate_batch(BATCH), return_exceptions=True
        )
        assert isinstance(refused, ValueError) and refused.__notes__ == [
            f"raised in engine 0; full traceback: {log_file}"
        ]
        assert not isinstance(output, BaseException) and output["response_ids"] == outputs[0]["response_ids"]

        deltas: list[TokenDelta] = []
        long = GenerationRequest(prompt_token_ids=[5, 6, 7], sampling_params=LONG)
        whole, streamed = await asyncio.gather(engine.generate(long), engine.stream(long, deltas.append))
        assert streamed == whole and deltas
        first, num = join_deltas(deltas), sum(len(delta.token_ids) for delta in deltas)
        assert first.token_ids == whole.token_ids[:num]
        assert first.log_probs == (whole.log_probs or [])[:num]
        closed = asyncio.create_task(engine.stream(long, deltas.append))
        async with asyncio.timeout(60):
            while await engine._call_control(Stoppable.num_requests) == 0 and not closed.done():
                await asyncio.sleep(0.01)
            closed.cancel()
            while await engine._call_control(Stoppable.num_requests):
                await asyncio.sleep(0.01)

        await engine._call_control(Stoppable.occupy, 4.0, True)
        async with asyncio.timeout(60):
            for _ in range(3):  # a second each: longer than the patience, but something is computed
                await actor.check_health.remote(0.5)
            await engine.weight_version()
            await engine._call_control(Stoppable.occupy, 300.0, False)
            await actor.check_health.remote(0.5)
            with pytest.raises(WorkerError, match=r"0\.5 s"):
                while True:
                    await actor.check_health.remote(0.5)
    finally:
        await asyncio.to_thread(engine.kill)
