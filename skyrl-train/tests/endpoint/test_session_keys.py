"""A key or a base URL of a session is all that an agent needs for its requests to be recorded as that session's."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from skyrl_train.endpoint.keys import EndpointKeys
from skyrl_train.endpoint.openai_api import generation
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.recorder import RequestRecorder, SessionRules
from skyrl_train.inference_engines.base import (
    Completion,
    GenerationRequest,
    OnTokens,
)
from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.native.loading import load_tokenizer

from .conftest import client_of, serving

STRANGE = "task 7/a:b?%2F"


async def test_session_keys_and_urls_select_only_their_session(chat_engine, chat_model):
    recorder = RequestRecorder()
    async with serving(chat_engine, chat_model, recorder=recorder, api_key="secret") as server:

        async def ask(**settings):
            async with client_of(server, **settings) as client:
                await client.completions.create(model="tiny", prompt="ab", max_tokens=1)

        await ask(api_key=server.session_key("by-key"))
        await ask(api_key="secret", base_url=server.session_url(STRANGE))
        await ask(api_key="secret", default_headers={"X-Session-ID": "by-header"})
        await ask(api_key=server.session_key("both"), base_url=server.session_url("both"))
        await ask(api_key="secret")  # of no session
        assert sorted(recorder.list_sessions()) == sorted(["by-key", STRANGE, "by-header", "both"])

        with pytest.raises(openai.PermissionDeniedError, match="session 'a'"):
            await ask(api_key=server.session_key("a"), base_url=server.session_url("b"))
        with pytest.raises(openai.PermissionDeniedError):
            await ask(api_key=server.session_key("a"), default_headers={"X-Session-ID": "b"})
        with pytest.raises(openai.BadRequestError, match="differ"):
            await ask(api_key="secret", base_url=server.session_url("a"), default_headers={"X-Session-ID": "b"})
        with pytest.raises(openai.AuthenticationError):
            await ask(api_key=EndpointKeys("another").of_session("a"))
        with pytest.raises(openai.AuthenticationError):  # a URL is no key
            await ask(api_key="any", base_url=server.session_url("a"))
        assert len(recorder.list_sessions()) == 4

        async with httpx.AsyncClient(base_url=server.url) as plain:
            answer = await plain.get("/models", headers={"x-api-key": server.session_key("a")})
            assert answer.status_code == 200
            assert (await plain.get(server.session_url("a"))).status_code == 404
            for both in (("secret", "a"), ("a", "secret")):  # one key in each header
                bearer, key = (each if each == "secret" else server.session_key(each) for each in both)
                headers = {"Authorization": f"Bearer {bearer}", "x-api-key": key}
                body = {"model": "tiny", "prompt": "ab", "max_tokens": 1}
                assert (await plain.post("/completions", headers=headers, json=body)).status_code == 200
                assert len(recorder.take("a")) == 1
            headers["Authorization"], headers["x-api-key"] = (
                f"Bearer {server.session_key('b')}",
                server.session_key("a"),
            )
            answer = await plain.post("/completions", headers=headers, json=body)
            assert (answer.status_code, "two sessions, 'a' and 'b'" in answer.text) == (403, True)
            nameless = server.url.replace("/v1", "/s//v1/completions")
            answer = await plain.post(nameless, headers={"x-api-key": "secret"}, json=body)
            assert (answer.status_code, "names no session" in answer.text) == (404, True)


async def test_only_generating_requests_use_session_turns(chat_engine, chat_model):
    recorder = RequestRecorder(begun_only=True)
    recorder.begin("s", SessionRules(max_turns=1, max_tokens=5))
    async with (
        serving(chat_engine, chat_model, recorder=recorder, max_requests=2) as server,
        client_of(server, api_key=server.session_key("s")) as client,
    ):

        async def ask(**settings):
            return await client.completions.create(**{"model": "tiny", "prompt": "ab", "max_tokens": 9} | settings)

        for wrong in ({"temperature": -1.0}, {"logit_bias": {"9999999": 1}}, {"prompt": [[9999999]]}):
            with pytest.raises(openai.BadRequestError):
                await ask(**wrong)
        with pytest.raises(openai.RateLimitError):
            await ask(n=3)
        scores = await ask(max_tokens=0, echo=True, logprobs=0)
        assert scores.choices[0].text == "ab"
        with pytest.raises(openai.PermissionDeniedError, match="1 turns is exhausted"):
            await ask(prompt=["a", "b"])
        answer = await ask(extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 5
        with pytest.raises(openai.PermissionDeniedError, match="1 turns is exhausted"):
            await ask(stream=True)
    taken = recorder.take_record("s")
    assert (taken.num_admitted, taken.num_answered, taken.num_generated) == (1, 1, 5)


async def test_server_without_key_accepts_session_and_other_keys(chat_engine, chat_model):
    recorder = RequestRecorder()
    async with serving(chat_engine, chat_model, recorder=recorder) as server:
        for key in (server.session_key("a"), "any"):
            async with client_of(server, api_key=key) as client:
                await client.completions.create(model="tiny", prompt="ab", max_tokens=1)
        assert recorder.list_sessions() == ["a"]
        async with client_of(server, api_key=server.session_key("a")[:-2] + "xx") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


def test_session_key_is_equal_in_all_processes_with_server_key():
    key = EndpointKeys("secret").of_session("größe/7")
    assert key == EndpointKeys("secret").of_session("größe/7")
    assert EndpointKeys("secret").find_session(["x", key]) == "größe/7"


class EmptyAnswers:
    """Engine that ends every answer at once and leaves the stop token out, as some servers do."""

    def __init__(self, engine: Any):
        self.describe = engine.describe

    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion([], "stop", [], [])

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        return await self.generate(request)


async def test_empty_completions_are_recorded_and_continued(chat_engine, chat_model):
    recorder = RequestRecorder()
    engine: Any = EmptyAnswers(chat_engine)
    async with (
        serving(engine, chat_model, recorder=recorder) as server,
        client_of(server, api_key=server.session_key("s")) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        for stream in (False, True, False):
            answer: Any = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=4, stream=stream
            )
            last = [chunk async for chunk in answer][-1] if stream else answer
            assert last.choices[0].finish_reason == "stop"
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "Well?"}]
        for stream in (False, True):
            answer = await client.completions.create(model="tiny", prompt="ab", max_tokens=4, echo=True, stream=stream)
            texts = [each.choices[0].text async for each in answer] if stream else [answer.choices[0].text]
            assert "".join(texts) == "ab"
    assert [turn.response_ids for turn in recorder.take("s")] == [[]] * 5
    assert server.frontend.take_metrics()["endpoint/exact_turns"] == 2


async def test_failed_choice_fails_request(chat_engine, chat_model):
    class OneFails(EmptyAnswers):
        num_requests = 0

        async def generate(self, request: GenerationRequest) -> Completion:
            self.num_requests += 1
            if self.num_requests == 2:
                raise ConstraintFailed("too complex: states")
            return await super().generate(request)

    engine: Any = OneFails(chat_engine)
    async with serving(engine, chat_model) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="too complex: states"):
            await client.completions.create(model="tiny", prompt="ab", n=2)


async def test_request_deadline_includes_waiting_for_session_tokens(chat_engine, chat_model, monkeypatch):
    """Its deadline was counted anew once it was admitted: twice the limit in all."""
    recorder, seconds, begun, goes_on = RequestRecorder(), [], asyncio.Event(), asyncio.Event()
    recorder.begin("s", SessionRules(max_tokens=5))

    class Deadline(generation._Deadline):
        def __init__(self, left: float):
            seconds.append(left)
            super().__init__(left)

    class Slow(EmptyAnswers):
        async def generate(self, request: GenerationRequest) -> Completion:
            begun.set()
            await goes_on.wait()
            return await super().generate(request)

    monkeypatch.setattr(generation, "_Deadline", Deadline)
    engine: Any = Slow(chat_engine)
    settings: Any = {"recorder": recorder, "request_timeout_seconds": 60.0}
    frontend = OpenAIFrontend(engine, load_tokenizer(chat_model, False), "tiny", **settings)
    body = b'{"model": "tiny", "prompt": "ab", "max_tokens": 5, "stream": %s}'
    first = asyncio.create_task(frontend.completion(body % b"false", "s"))
    await begun.wait()
    waiting = asyncio.create_task(frontend.completion(body % b"false", "s"))
    await asyncio.sleep(0.2)
    goes_on.set()
    await asyncio.gather(first, waiting)
    assert seconds[0] == pytest.approx(60, abs=0.05)
    assert seconds[1] < 59.85
