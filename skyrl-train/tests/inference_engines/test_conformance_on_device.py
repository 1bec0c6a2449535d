"""A sample of the contract of engines, on a GPU and on a CPU: numbers, updates, adapters, both levels of sleep."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.engine_conformance import CHECKS, EngineUnderTest, check_engine, make_tiny_model

SAMPLE = {
    *("check_log_probs", "check_prompt_log_probs", "check_greedy_tokens", "check_update"),
    *("check_concurrent_adapters", "check_sleep", "check_deep_sleep"),
}


def make_engine(backend: str, path: str, device: str, dtype: str) -> Any:
    if backend == "native":
        return NativeInferenceEngine(path, device=device, dtype=dtype)
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_lora_rank": 8}
    on_gpu = {"gpu_memory_utilization": 0.2, "sleep_mode": True}
    return VLLMInferenceEngine(path, device=device, dtype=dtype, control_timeout_seconds=120.0, **sizes, **on_gpu)


@pytest.mark.parametrize(
    "backend, device, dtype",
    [
        ("native", "cpu", "float32"),
        pytest.param("native", "cuda", "bfloat16", marks=pytest.mark.gpu),
        pytest.param(
            *("vllm", "cuda", "bfloat16"),
            marks=[pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")],
        ),
    ],
)
def test_engine_conforms_on_device(backend: str, device: str, dtype: str, tmp_path: Path):
    path = make_tiny_model(tmp_path / "tiny", tied=True)

    async def check() -> Any:
        engine = make_engine(backend, path, device, dtype)
        try:
            return await check_engine(EngineUnderTest(engine, path), [each for each in CHECKS if each.name in SAMPLE])
        finally:
            await engine.teardown()

    report = asyncio.run(check())
    assert not report.failures, "\n".join(outcome.words for outcome in report.failures)
    assert len(report.outcomes) == len(SAMPLE)
