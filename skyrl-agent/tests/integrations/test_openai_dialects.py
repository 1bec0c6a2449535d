"""Requests are reduced to the features of a server; its wrong responses are classified."""

from typing import Any

import pytest

from skyrl_agent.errors import BackendError, ConfigError, InfraError
from skyrl_agent.integrations.openai import OpenAIBackend
from skyrl_agent.testing import byte_tokenizer
from skyrl_gym.services import Retries

from ..tools_general.agent_web_server import Asked, web_server

Reply = tuple[int, Any]
OPENAI_FIELDS = {"model", "prompt", "max_tokens", "temperature", "stop", "seed"}


def choice(**fields: Any) -> Reply:
    return 200, {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"} | fields]}


async def ask(url: str, **settings: Any) -> tuple[str, Any]:
    backend = OpenAIBackend(None, byte_tokenizer(), {"model_name": "m", "api_url": url} | settings)
    return await backend.async_generate_ids(
        input_ids=byte_tokenizer().encode("really?"), sampling_params={"max_tokens": 5}, request_id="r"
    )


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_agent.integrations.openai.RETRIES", Retries(attempts=2, first_wait=0.01))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def test_text_only_server_returns_text():
    """The server supports OpenAI's fields only, and no token ids as prompts."""

    def reply(asked: Asked) -> Reply:
        if set(asked.body) - OPENAI_FIELDS or not isinstance(asked.body["prompt"], str):
            return 400, {"error": {"message": "what is this?"}}
        return choice()

    with web_server(reply) as server:
        backend = OpenAIBackend(None, byte_tokenizer(), {"model_name": "m", "api_url": server.url})
        for _ in range(2):
            text, meta = await backend.async_generate_ids(
                input_ids=byte_tokenizer().encode("really?"), sampling_params={}, request_id="r"
            )
    assert (text, meta["output_tokens"], meta["logprobs"]) == ("yes", None, None)
    assert [asked.body["prompt"] for asked in server.asked[2:]] == ["really?"] * 2, (
        "what it understands is found out once"
    )


async def test_text_only_server_stops_at_text_of_stop_ids():
    def reply(asked: Asked) -> Reply:
        return choice() if not set(asked.body) - OPENAI_FIELDS and isinstance(asked.body["prompt"], str) else (400, {})

    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    with web_server(reply) as server:
        backend = OpenAIBackend(None, byte_tokenizer(), {"model_name": "m", "api_url": server.url})
        params = {"stop": ["</call>"], "stop_token_ids": [end]}
        await backend.async_generate_ids(input_ids=[1], sampling_params=params, request_id="r")
    assert [asked.body.get("stop_token_ids") for asked in server.asked] == [[end], [end], None]
    assert server.asked[-1].body["stop"] == ["</call>", "<|im_end|>"]


async def test_removed_stop_string_is_restored():
    with web_server(lambda asked: choice(text="<call>x", stop_reason="</call>")) as server:
        assert (await ask(server.url))[0] == "<call>x</call>"


async def test_api_key_is_sent_when_configured(monkeypatch: pytest.MonkeyPatch):
    with web_server(lambda asked: choice()) as server:
        await ask(server.url + "/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "s3cret\n")
        await ask(server.url)
    assert [asked.headers.get("authorization") for asked in server.asked] == [None, "Bearer s3cret"]


@pytest.mark.parametrize(
    "answer, error, text",
    [
        ((401, {"error": "no key"}), BackendError, "HTTP 401"),
        ((400, {"error": "too long"}), BackendError, "too long"),
        ((503, {"error": "busy"}), InfraError, "HTTP 503"),
        ((200, b"<html>"), InfraError, "sent no completion"),
        ((200, {"choices": []}), InfraError, "sent no completion"),
        (choice(finish_reason="abort"), InfraError, "aborted"),
    ],
)
async def test_server_errors_map_to_error_types(answer: Reply, error: type[Exception], text: str):
    with web_server(lambda asked: answer) as server, pytest.raises(error, match=text):
        await ask(server.url)


async def test_log_probs_of_wrong_length_become_null():
    ids = byte_tokenizer().encode("yes")
    with web_server(lambda asked: choice(token_ids=ids, logprobs={"token_logprobs": [-1.0]})) as server:
        text, meta = await ask(server.url)
    assert (text, meta["output_tokens"], meta["logprobs"]) == ("yes", ids, None)


async def test_full_context_finishes_with_length():
    text, meta = await ask("http://127.0.0.1:9", model_max_len=7)
    assert (text, meta["output_tokens"], meta["finish_reason"]) == ("", [], "length")


@pytest.mark.parametrize("settings", [{"api_url": "ftp://x"}, {"max_len": 3}, {"model_max_len": 0}])
def test_invalid_settings_are_rejected(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"generator\.backend_config"):
        OpenAIBackend(None, byte_tokenizer(), {"model_name": "m"} | settings)
