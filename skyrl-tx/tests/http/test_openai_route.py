"""Refusals of the OpenAI-compatible route, and their texts."""

import pytest

JSON = {"content-type": "application/json"}
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = b"1" + b"0" * 30


def chat(content: bytes = b'"Hi"', more: bytes = b"") -> bytes:
    return b'{"model": "tiny", "messages": [{"role": "user", "content": ' + content + b"}]" + more + b"}"


@pytest.mark.parametrize(
    "body, status, says",
    [
        (chat(b'"\\ud800"'), 400, "body must be JSON"),
        (chat(b'"\xed\xa0\x80"'), 400, "body must be JSON"),
        (chat(more=b', "stop": "\\udfff"'), 400, "body must be JSON"),
        (chat(DEEP), 400, "body must be JSON: recursion limit"),
        (chat(b'"Hi", "tool_calls": ' + DEEP), 400, "body must be JSON: recursion limit"),
        (chat(more=b', "max_tokens": ' + HUGE), 422, "max_tokens: "),
        (chat(more=b', "max_completion_tokens": ' + HUGE), 422, "max_completion_tokens: "),
        (chat(more=b', "max_completion_tokens": 0, "max_tokens": 3'), 400, "max_tokens must be 1 to"),
        (chat(more=b', "n": ' + HUGE), 422, "n: "),
        (chat(more=b', "seed": ' + HUGE), 422, "seed: "),
    ],
)
async def test_openai_chat_refuses_invalid_request_with_reason(client, body, status, says):
    answer = await client.post("/oai/api/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"].startswith((says, f"sampling_params.{says}"))


@pytest.mark.parametrize("prompt", [b'"\\ud800"', DEEP, b"[5, " + HUGE + b"]"])
async def test_openai_completions_refuse_invalid_prompt(client, prompt):
    body = b'{"model": "tiny", "max_tokens": 2, "prompt": ' + prompt + b"}"
    answer = await client.post("/oai/api/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"authorization": "Bearer tml-anna-key"}, 200),
        ({"authorization": "tml-anna-key"}, 401),
        ({"authorization": "Token tml-anna-key"}, 401),
        ({"authorization": "Bearer"}, 401),
    ],
)
async def test_authorization_header_needs_bearer_scheme(served, headers, status):
    nobody = await served("nobody")
    assert (await nobody.get("/oai/api/v1/models", headers=headers)).status_code == status
