"""Each backend that can run here keeps what backends promise."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from skyrl_agent.integrations.base import build_backend
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_agent.testing.backend_conformance import CHECKS, NOT_ASKED, Check, Subject, run_check
from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient

PROMPT = "<start>user:what is 3 and 4?<end><start>assistant:"
DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
@pytest.mark.parametrize("tells_ids", [True, False], ids=["ids", "text alone"])
async def test_scripted_model_conforms_to_backend(check: Check, tells_ids: bool):
    tokenizer = byte_tokenizer()
    model = ScriptedModel(tokenizer, ["the answer is 7"], tells_ids=tells_ids)
    subject = Subject(
        model, tokenizer, tokenizer.encode("?"), tells_ids=tells_ids, reads_ids=False, checks_requests=False
    )
    await run_check(check, subject)


@every_check
async def test_skyrl_train_engine_conforms_to_backend(check: Check, engine: Any, tokenizer: Any):
    backend = build_backend("skyrl-train", infer_engine=engine, tokenizer=tokenizer)
    outcome = await run_check(check, Subject(backend, tokenizer, tokenizer.encode(PROMPT)))
    assert (outcome == NOT_ASKED) == (check.__name__ == "a_dead_server_is_an_infrastructure_failure")


@every_check
async def test_openai_server_conforms_to_backend(
    check: Check, endpoint: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEST_ENDPOINT_KEY", "secret")
    monkeypatch.setattr("skyrl_agent.integrations.openai.RETRIES", replace(_retries(), attempts=1))

    def at(url: str) -> Any:
        cfg = {"model_name": "tiny", "api_url": url, "api_key_env": "TEST_ENDPOINT_KEY"}
        return build_backend("openai_server", infer_engine=None, tokenizer=tokenizer, cfg=cfg)

    subject = Subject(at(endpoint.url), tokenizer, tokenizer.encode(PROMPT), dead=at(DEAD))
    assert await run_check(check, subject) is None


def _retries() -> Any:
    from skyrl_agent.integrations.openai import RETRIES

    return RETRIES


async def test_turn_interrupted_by_weight_sync_is_continued(engine: Any, tokenizer: Any):
    """The trainer's client pauses the engine in the middle of an answer; the agent gets one answer, of both parts."""
    client = InferenceEngineClient([engine], tokenizer, SkyRLConfig())
    backend = build_backend("skyrl-train", infer_engine=client, tokenizer=tokenizer)

    def ask() -> Any:
        params: Any = {"temperature": 0.0, "max_tokens": 60, "min_tokens": 60}
        return backend.async_generate_ids(input_ids=tokenizer.encode(PROMPT), sampling_params=params, request_id="a")

    text, whole = await ask()
    asked, before = asyncio.ensure_future(ask()), engine.progress()
    while engine.progress() < before + 9:
        await asyncio.sleep(0)
    await client.pause_generation("abort")
    assert not asked.done()
    await client.resume_generation()
    continued = await asked
    assert client.take_metrics()["engines/continued_requests"] == 1
    assert (continued[0], continued[1]["output_tokens"]) == (text, whole["output_tokens"])
    assert len(whole["output_tokens"]) == len(continued[1]["logprobs"]) == len(continued[1]["weight_versions"]) == 60
