"""LiteLLM, through which many agents talk, in front of the endpoint."""

import json
import warnings

import pytest

from .conftest import ADD, CALL, QUESTION, serving

with warnings.catch_warnings():  # of its own imports
    warnings.simplefilter("ignore")
    litellm = pytest.importorskip("litellm")

pytestmark = pytest.mark.filterwarnings("default")  # what LiteLLM warns of is not ours to mend


@pytest.fixture
async def settings(tool_engine, tool_model):
    async with serving(tool_engine, tool_model) as server:
        yield dict(model="openai/tiny", api_base=server.url, api_key="any", num_retries=0, temperature=0, max_tokens=80)


async def test_tool_calls_and_token_ids_are_returned(settings):
    answer = await litellm.acompletion(
        messages=[QUESTION], tools=[ADD], extra_body={"return_token_ids": True}, logprobs=True, **settings
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert len(choice.provider_specific_fields["token_ids"]) == answer.usage.completion_tokens


async def test_stream_chunks_are_combined(settings):
    whole = await litellm.acompletion(messages=[QUESTION], **settings)
    stream = await litellm.acompletion(messages=[QUESTION], stream=True, **settings)
    chunks = [chunk async for chunk in stream]
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == whole.choices[0].message.content
    with_tools = await litellm.acompletion(messages=[QUESTION], tools=[ADD], stream=True, **settings)
    built = litellm.stream_chunk_builder([chunk async for chunk in with_tools])
    assert built.choices[0].message.tool_calls[0].function.name == "add"


async def test_errors_map_to_litellm_classes(settings):
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(messages=[QUESTION], **(settings | {"model": "openai/gpt-4"}))
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(messages=[{"role": "user", "content": CALL * 20}], **settings)
    with pytest.raises(litellm.BadRequestError):
        await litellm.acompletion(messages=[QUESTION], response_format={"type": "json_object"}, **settings)
