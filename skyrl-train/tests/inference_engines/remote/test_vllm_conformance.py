"""A vLLM server that the test starts on loopback keeps what every engine keeps."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pydantic import SecretStr
from server_process import KEY, ServerProcess
from transformers import AutoTokenizer

from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train_testing.engine_conformance import CHECKS, Check, EngineUnderTest, run_check

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

WAYS = (("shared_memory", "full"), ("broadcast", "full"), ("checkpoint", "full"), ("shared_memory", "delta"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(vllm: ServerProcess, served_model: str) -> AsyncIterator[EngineUnderTest]:
    engine = RemoteInferenceEngine(
        vllm.url,
        served_model,
        tokenizer=AutoTokenizer.from_pretrained(served_model),
        request_timeout_seconds=240,
        control_timeout_seconds=120,
        api_key=SecretStr(KEY),
    )
    subject = EngineUnderTest(engine, served_model, ways=WAYS)
    yield subject
    await subject.close()
    await engine.teardown()


async def test_a_request_that_reaches_the_server_after_the_pause_is_ended_by_it(
    subject: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = subject.engine._protocol  # pyright: ignore[reportAttributeAccessIssue]
    complete = protocol.complete

    async def slow_way(*request):
        await asyncio.sleep(0.3)
        return await complete(*request)

    await subject.prepare()
    monkeypatch.setattr(protocol, "complete", slow_way)
    late = subject.begin([subject.prompt(4)], max_tokens=3, ignore_eos=True)
    await asyncio.sleep(0.1)  # it is on its way
    await subject.in_time(subject.engine.pause_generation("abort"))
    assert (await subject.in_time(late, 5))["stop_reasons"] == ["abort"]
    await subject.engine.resume_generation()
    assert (await subject.generate([subject.prompt(4)], max_tokens=3, ignore_eos=True))["stop_reasons"] == ["length"]


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_the_server_keeps(check: Check, subject: EngineUnderTest) -> None:
    # The last check ends the engine's life.
    outcome = await run_check(check, subject)
    if outcome.result == "lacks":
        pytest.skip(outcome.words)
