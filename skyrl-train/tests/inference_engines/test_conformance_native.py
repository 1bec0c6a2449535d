"""The native engine keeps what every engine keeps, with tied and untied embeddings and in half precision."""

import asyncio

import pytest

from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.engine_conformance import CHECKS, EngineUnderTest, make_tiny_model, run_check

WAYS = (("shared_memory", "full"), ("shared_memory", "delta"), ("broadcast", "full"), ("checkpoint", "full"))


@pytest.fixture(scope="module", params=["tied float32", pytest.param("untied bfloat16", marks=pytest.mark.full)])
def subject(request, tmp_path_factory):
    embeddings, dtype = request.param.split()
    path = make_tiny_model(tmp_path_factory.mktemp(embeddings), tied=embeddings == "tied")
    engine = NativeInferenceEngine(path, dtype=dtype, max_model_len=320)  # as long as answers that are caught under way
    under_test = EngineUnderTest(engine, path, ways=WAYS)
    yield under_test
    asyncio.run(under_test.close())
    asyncio.run(engine.teardown())


SLOW = {
    "check_abort",
    "check_pause_keep_stops",
    "check_pause_keep_changes_nothing",
    "check_lost_bucket",
    "check_update_during_responses",
}
"""Those that wait for answers to be under way, or for deadlines."""


@pytest.mark.parametrize(
    "check", [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in CHECKS]
)
async def test_native_engine_conforms_to_engine_contract(check, subject):
    outcome = await run_check(check, subject)
    assert outcome.result == "passed", outcome.words  # the native engine lacks nothing
