"""Requests are reduced to the features of a server; its wrong responses are classified."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from skyrl_agent.errors import BackendError, ConfigError, InfraError
from skyrl_agent.integrations.openai import OpenAIBackend
from skyrl_agent.testing import byte_tokenizer
from skyrl_gym.services import Retries

Reply = tuple[int, Any]
OPENAI_FIELDS = {"model", "prompt", "max_tokens", "temperature", "stop", "seed"}


@contextmanager
def serving(reply: Callable[[dict[str, Any], dict[str, str]], Reply]) -> Iterator[str]:
    """A server whose answers are `reply(body, headers)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = reply(body, dict(self.headers))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


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


async def test_a_server_of_text_alone():
    """The server supports OpenAI's fields only, and no token ids as prompts."""
    prompts = []

    def reply(body: dict[str, Any], headers: dict[str, str]) -> Reply:
        prompts.append(body["prompt"])
        if set(body) - OPENAI_FIELDS or not isinstance(body["prompt"], str):
            return 400, {"error": {"message": "what is this?"}}
        return choice()

    with serving(reply) as url:
        backend = OpenAIBackend(None, byte_tokenizer(), {"model_name": "m", "api_url": url})
        for _ in range(2):
            text, meta = await backend.async_generate_ids(
                input_ids=byte_tokenizer().encode("really?"), sampling_params={}, request_id="r"
            )
    assert (text, meta["output_tokens"], meta["logprobs"]) == ("yes", None, None)
    assert prompts[2:] == ["really?"] * 2, "what it understands is found out once"


async def test_a_stop_string_that_was_cut_off_is_put_back():
    with serving(lambda body, headers: choice(text="<call>x", stop_reason="</call>")) as url:
        assert (await ask(url))[0] == "<call>x</call>"


async def test_a_key_is_sent_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def reply(body: dict[str, Any], headers: dict[str, str]) -> Reply:
        seen.append(headers.get("Authorization"))
        return choice()

    with serving(reply) as url:
        await ask(url + "/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "s3cret\n")
        await ask(url)
    assert seen == [None, "Bearer s3cret"]


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
async def test_errors_have_their_type(answer: Reply, error: type[Exception], text: str):
    with serving(lambda body, headers: answer) as url, pytest.raises(error, match=text):
        await ask(url)


async def test_log_probs_that_are_not_one_a_token_are_none():
    ids = byte_tokenizer().encode("yes")
    with serving(lambda body, headers: choice(token_ids=ids, logprobs={"token_logprobs": [-1.0]})) as url:
        text, meta = await ask(url)
    assert (text, meta["output_tokens"], meta["logprobs"]) == ("yes", ids, None)


async def test_a_context_that_is_full_is_an_answer_of_length():
    text, meta = await ask("http://127.0.0.1:9", model_max_len=7)
    assert (text, meta["output_tokens"], meta["finish_reason"]) == ("", [], "length")


@pytest.mark.parametrize("settings", [{"api_url": "ftp://x"}, {"max_len": 3}, {"model_max_len": 0}])
def test_wrong_settings_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"generator\.backend_config"):
        OpenAIBackend(None, byte_tokenizer(), {"model_name": "m"} | settings)
