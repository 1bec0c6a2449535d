"""Each backend that can run here keeps what backends promise."""

from dataclasses import replace
from typing import Any

import pytest

from skyrl_agent.integrations.base import build_backend
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_agent.testing.backend_conformance import CHECKS, NOT_ASKED, Check, Subject, run_check

PROMPT = "<start>user:what is 3 and 4?<end><start>assistant:"
DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
@pytest.mark.parametrize("tells_ids", [True, False], ids=["ids", "text alone"])
async def test_scripted(check: Check, tells_ids: bool):
    tokenizer = byte_tokenizer()
    model = ScriptedModel(tokenizer, ["the answer is 7"], tells_ids=tells_ids)
    subject = Subject(
        model, tokenizer, tokenizer.encode("?"), tells_ids=tells_ids, reads_ids=False, checks_requests=False
    )
    await run_check(check, subject)


@every_check
async def test_engine_of_skyrl_train(check: Check, engine: Any, tokenizer: Any):
    backend = build_backend("skyrl-train", infer_engine=engine, tokenizer=tokenizer)
    outcome = await run_check(check, Subject(backend, tokenizer, tokenizer.encode(PROMPT)))
    assert (outcome == NOT_ASKED) == (check.__name__ == "a_dead_server_is_an_infrastructure_failure")


@every_check
async def test_openai_server(check: Check, endpoint: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
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
