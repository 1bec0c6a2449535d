"""Streams: the same answer as without, piece by piece."""

import asyncio

import httpx
import pytest

from .conftest import ADD, QUESTION, client_of, in_thread, serving

EVERY_TOKEN = {"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
"""Request fields for which the text contains every token."""
HELLO = [{"role": "user", "content": "Hello"}]


async def test_streamed_chat_equals_whole_response(chat_client):
    settings = dict(
        model="tiny",
        messages=HELLO,
        seed=4,
        max_tokens=100,
        logprobs=True,
        n=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    whole = await chat_client.chat.completions.create(**settings)
    stream = await chat_client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole.choices):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert sum(bool(part.delta.content) for part in own) > 2
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        assert [token for part in own for token in getattr(part, "token_ids", [])] == choice.token_ids
        entries = [entry for part in own if part.logprobs for entry in part.logprobs.content]
        assert [entry.logprob for entry in entries] == pytest.approx(
            [entry.logprob for entry in choice.logprobs.content]
        )


async def test_streamed_completion_equals_whole_completion(chat_engine, chat_model):
    settings = dict(model="tiny", prompt=["abc", "d"], seed=4, max_tokens=60, logprobs=0, echo=False)
    async with serving(chat_engine, chat_model) as server:
        whole = await in_thread(server, lambda client: client.completions.create(**settings))
        chunks = await in_thread(server, lambda client: list(client.completions.create(**settings, stream=True)))
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(part.text for part in own) == choice.text
        offsets = [offset for part in own for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        assert len(own) > 5


@pytest.mark.parametrize("place", [3, 14, 30])
async def test_stop_text_ends_stream_and_is_excluded(chat_client, place):
    settings = dict(model="tiny", prompt="abc", seed=8, max_tokens=60, extra_body=EVERY_TOKEN)
    tokens = (await chat_client.completions.create(**settings, logprobs=0)).choices[0].logprobs.tokens
    stop, before = "".join(tokens[place : place + 4]), "".join(tokens[:place])
    assert "".join(tokens).index(stop) == len(before)
    whole = await chat_client.completions.create(**settings, stop=stop)
    stream = await chat_client.completions.create(**settings, stop=stop, stream=True)
    parts = [chunk.choices[0] async for chunk in stream]
    assert whole.choices[0].text == before
    assert "".join(part.text for part in parts) == before
    assert parts[-1].finish_reason == "stop"
    assert sum(len(part.token_ids) for part in parts) == whole.usage.completion_tokens == place + 4


async def test_streamed_tool_call_is_delivered_whole(tool_engine, tool_model):
    async with serving(tool_engine, tool_model) as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[QUESTION], tools=[ADD], temperature=0, max_tokens=80, stream=True
        )
        parts = [chunk.choices[0] async for chunk in stream]
    assert "".join(part.delta.content or "" for part in parts) == ""
    [calls] = [part.delta.tool_calls for part in parts if part.delta.tool_calls]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "add", '{"a": 2, "b": 3}')
    ]
    assert parts[-1].finish_reason == "tool_calls"


async def test_client_disconnect_ends_request(chat_engine, chat_model):
    """The engine refuses to sleep while requests run: it sleeps once the clients are gone."""
    async with serving(chat_engine, chat_model) as server:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "abc", "stream": stream, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=30) as client:
                waiting = asyncio.create_task(client.post(f"{server.url}/completions", json=body))
                await wait_until(lambda: chat_engine._core.num_running > 0)
                await chat_engine.pause_generation("keep")
                with pytest.raises(RuntimeError, match="requests run"):
                    await chat_engine.sleep()
                waiting.cancel()
                await asyncio.wait({waiting})
            await wait_until(lambda: chat_engine._core.num_running == 0)
            await chat_engine.sleep()
            await chat_engine.wake_up()
            await chat_engine.resume_generation()


async def wait_until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)
