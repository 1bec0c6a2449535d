"""Refused requests are errors in the form that the `openai` client knows."""

import asyncio
import json
import re

import httpx
import openai
import pytest

from skyrl_train.endpoint.openai_api.schema import MAX_ANSWERS
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.loading import load_tokenizer

from .conftest import client_of, engine_of, serving

HELLO = [{"role": "user", "content": "Hello"}]


async def test_unknown_model_returns_not_found(chat_client):
    with pytest.raises(openai.NotFoundError, match="tiny") as raised:
        await chat_client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


async def test_prompt_filling_context_is_rejected(chat_client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as raised:
            await chat_client.completions.create(model="tiny", prompt="a" * 256, stream=stream)
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "wrong, param, says",
    [
        ({"messages": []}, "messages", "at least one"),
        ({"verbosity": "low"}, "verbosity", "remove the field"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"temperature": -1}, None, "temperature must be 0"),
        ({"top_p": 0}, None, "top_p"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "set the same limit"),
        ({"max_tokens": "4"}, "max_tokens", "valid integer"),
        ({"extra_body": {"stop_token_id": [3]}}, "stop_token_id", "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [30_000]}}, None, "vocabulary"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs", "must not contain"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0", "text"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "messages", "'assistant'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_unsupported_fields_are_rejected_by_name(chat_client, wrong, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        await chat_client.chat.completions.create(**({"model": "tiny", "messages": HELLO, "max_tokens": 4} | wrong))
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


async def test_fields_with_neutral_values_are_accepted(chat_client):
    answer = await chat_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HELLO],
        max_tokens=2,
        user="someone",
        metadata={"run": "1"},
        store=False,
        service_tier="auto",
        frequency_penalty=0,
        presence_penalty=0.0,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="auto",
        modalities=["text"],
    )
    assert answer.usage.completion_tokens <= 2


async def test_invalid_json_large_body_and_unknown_route_are_rejected(chat_engine, chat_model):
    async with serving(chat_engine, chat_model) as server, httpx.AsyncClient(base_url=server.url) as client:
        for body, says in [(b"{", "not valid JSON"), (b"[]", "JSON object"), (b"", "empty")]:
            answer = await client.post("/chat/completions", content=body)
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        answer = await client.post("/completions", content=b" " * (64 * 1024 * 1024 + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.post("/embeddings", json={})).status_code == 404
        assert (await client.get("/completions")).status_code == 405
        assert (await client.get(server.url.replace("/v1", "/health"))).json() == {"status": "healthy"}


HUGE = b"1" + b"0" * 30


@pytest.mark.parametrize(
    "content, more, says",
    [
        (b'"\\ud800"', b"", "not valid JSON: .*hex escape"),
        (b"[" * 100_000 + b"]" * 100_000, b"", "not valid JSON: recursion limit"),
        (b'"a", "deep": ' + b"[" * 190 + b"]" * 190, b"", None),
        (b'"a"', b', "max_tokens": ' + HUGE, "max_tokens: .* less than"),
        (b'"a"', b', "top_k": ' + HUGE, "top_k: .* less than"),
        (b'"a"', b', "stop_token_ids": [' + HUGE + b"]", "stop_token_ids.0: .* less than"),
        (b'"a"', b', "temperature": NaN', "temperature"),
    ],
    ids=["lone surrogate", "deep", "allowed depth", "max_tokens", "top_k", "stop_token_ids", "NaN"],
)
async def test_non_json_values_and_huge_numbers_are_client_errors(chat_engine, chat_model, content, more, says):
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": ' + content + b"}]" + more + b"}"
    async with serving(chat_engine, chat_model) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/chat/completions", content=body)
    assert answer.status_code == (200 if says is None else 400), answer.text
    assert says is None or re.search(says, answer.json()["error"]["message"])


async def test_session_ids_of_header_and_body_must_match(chat_client):
    with pytest.raises(openai.BadRequestError, match="differ"):
        await chat_client.chat.completions.create(
            model="tiny", messages=HELLO, extra_headers={"X-Session-ID": "a"}, extra_body={"session_id": "b"}
        )


async def test_key_is_required_when_configured(chat_engine, chat_model):
    async with serving(chat_engine, chat_model, api_key="secret") as server:
        async with client_of(server) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(server, api_key="secret") as client:
            assert (await client.models.list()).data[0].id == "tiny"
        async with httpx.AsyncClient(base_url=server.url) as plain:
            headers = ["secret", "Basic secret", "Bearer", "Bearer wrong", "bearer secret", "Bearer  secret"]
            answers = [await plain.get("/models", headers={"Authorization": header}) for header in headers]
        assert [answer.status_code for answer in answers] == [401, 401, 401, 401, 200, 200]


async def test_choices_per_request_are_bounded(chat_client):
    for asked in ({"prompt": ["a"] * (MAX_ANSWERS + 1)}, {"prompt": ["a"] * 17, "n": 128}):
        with pytest.raises(openai.BadRequestError, match="Split them over several requests") as raised:
            await chat_client.completions.create(model="tiny", max_tokens=1, **asked)
        assert (raised.value.code, raised.value.param) == ("too_many_answers", "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_above_limit_are_rejected_until_others_end(chat_engine, chat_model, stream):
    async with serving(chat_engine, chat_model, max_requests=4) as server, client_of(server) as client:
        await chat_engine.pause_generation("keep")
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=2))
        async with asyncio.timeout(20):
            while server.frontend._num_under_way < 3:
                await asyncio.sleep(0.001)
        with pytest.raises(openai.RateLimitError, match=r"generator.http_endpoint_max_requests") as raised:
            await client.completions.create(model="tiny", prompt="d", n=2, max_tokens=2, stream=stream)
        assert raised.value.response.headers["Retry-After"] == "1"
        patient = asyncio.create_task(
            client.with_options(max_retries=20).completions.create(model="tiny", prompt="d", n=2, max_tokens=2)
        )
        await chat_engine.resume_generation()
        assert len((await waiting).choices) == 3
        assert len((await patient).choices) == 2
        events = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=2, stream=True)
        assert {choice.index async for event in events for choice in event.choices} == {0, 1, 2, 3}
        assert server.frontend._num_under_way == 0


async def test_overdue_request_returns_timeout(chat_engine, chat_model):
    async with (
        serving(chat_engine, chat_model, request_timeout_seconds=0.2) as server,
        client_of(server) as client,
    ):
        await chat_engine.pause_generation("keep")
        try:
            with pytest.raises(openai.InternalServerError) as raised:
                await client.completions.create(model="tiny", prompt="abc")
        finally:
            await chat_engine.resume_generation()
    assert (raised.value.status_code, raised.value.code) == (504, "timeout")


async def test_aborted_request_is_retriable(chat_engine, chat_model):
    async with serving(chat_engine, chat_model) as server, client_of(server, max_retries=2) as client:
        await chat_engine.pause_generation("keep")
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="abc", max_tokens=3))
        async with asyncio.timeout(20):
            while not chat_engine._core.num_waiting:
                await asyncio.sleep(0.001)
        await chat_engine.abort_generation()  # a 503, which the client answers by asking again
        await chat_engine.resume_generation()
        assert (await waiting).usage.completion_tokens <= 3


async def test_crashed_engine_returns_503_without_internals(chat_model):
    engine = engine_of(chat_model)
    async with serving(engine, chat_model) as server, client_of(server) as client:
        await client.models.list()
        await engine.teardown()
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as raised:
                await client.completions.create(model="tiny", prompt="abc", stream=stream)
            assert (raised.value.status_code, raised.value.code) == (503, "engine_unavailable")
            assert "Traceback" not in json.dumps(raised.value.body)
        async with httpx.AsyncClient() as plain:
            assert (await plain.get(server.url.replace("/v1", "/health"))).status_code == 503


async def test_port_in_use_and_unknown_host_raise_config_error(chat_engine, chat_model):
    async with serving(chat_engine, chat_model) as server:
        port = int(server.url.split(":")[2].removesuffix("/v1"))
        tokenizer = load_tokenizer(chat_model, False)
        with pytest.raises(ConfigError, match=f"generator.http_endpoint_port={port}"):
            await EndpointServer(chat_engine, tokenizer, "tiny", port=port).start()
        with pytest.raises(ConfigError, match=r"generator\.http_endpoint_host"):
            await EndpointServer(chat_engine, tokenizer, "tiny", host="192.0.2.1").start()
