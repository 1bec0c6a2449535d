"""Anthropic's own client against the Messages API of the endpoint."""

import json

import anthropic
import httpx
import pytest

from skyrl_train.endpoint.anthropic_api.schema import MessagesRequest, parse_request
from skyrl_train.endpoint.anthropic_api.translation import convert_request
from skyrl_train.endpoint.recorder import RequestRecorder

from .conftest import serving
from .protocol_kit import ANSWERS, FIRST, SECOND, THOUGHT, always, break_streams, one_row, root_url, scripted

ADD = {"name": "add", "description": "Adds", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
ASK = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "2+3?"}], "tools": [ADD]}


def client_for(server, **settings) -> anthropic.AsyncAnthropic:
    given = {"base_url": root_url(server), "api_key": "any", "max_retries": 0} | settings
    return anthropic.AsyncAnthropic(**given)


async def run_agent(client, streams: bool, **settings):
    """Ask, call the tools, give their results, say thanks. Yields the answers; blocks go back as they came."""
    messages = list(ASK["messages"])
    for turn in range(3):
        asked = ASK | {"messages": messages} | settings
        if streams:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        yield answer
        messages = [*messages, answer.to_param()]
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": str(5 + 2 * number)}]}
            for number, call in enumerate(calls)
        ]
        messages.append({"role": "user", "content": results or f"Thanks {turn}"})


@pytest.mark.parametrize("opened", [False, True], ids=["thought in the answer", "thought opened by the prompt"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_thoughts_and_parallel_tools_form_single_row(streams, opened):
    recorder = RequestRecorder()
    async with scripted(recorder=recorder, chat_template_kwargs={"thinks": opened}) as server:
        async with client_for(server, api_key=server.session_key("s")) as client:
            answers = [answer async for answer in run_agent(client, streams)]
        assert server.frontend.take_metrics()["endpoint/rendered_turns"] == 0

    first, second, third = answers
    thought, text, *calls = first.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert thought.signature
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 2, "b": 3}), ("add", {"b": 4, "a": "é"})]
    assert len({call.id for call in calls}) == 2
    assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
    assert first.usage.output_tokens_details.thinking_tokens == len(THOUGHT)
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.content[1].text == "It is 5 and 7."
    if opened:  # the third answer never closes the thought that the prompt opened
        assert [block.type for block in third.content] == ["thinking"]
    else:
        assert [block.text for block in third.content] == ["Bye.\n"]
    assert third.stop_reason == "end_turn"
    written, _ = one_row(recorder, "s")
    opening = "" if opened else "<think>"
    assert written == [f"{opening}{FIRST}<end>", f"{opening}{SECOND}<end>", "Bye.\n<end>"]


@pytest.mark.parametrize(
    ("asked", "drawn"),
    [({"top_p": 0, "top_k": 5}, (None, 1)), ({"top_p": 0.5, "top_k": 5}, (0.5, 5)), ({"top_k": 0}, (None, None))],
)
def test_top_p_0_is_greedy_and_top_k_0_is_disabled(asked, drawn):
    request = convert_request(parse_request(MessagesRequest, json.dumps(ASK | asked).encode()))
    assert (request.top_p, request.top_k) == drawn


async def test_stream_events_match_original_api():
    async with scripted() as server, httpx.AsyncClient() as plain:
        asked = ASK | {"stream": True}
        async with plain.stream("POST", root_url(server) + "/v1/messages", json=asked) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            blocks = (await answer.aread()).decode().split("\n\n")
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    index, deltas = -1, {}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            index += 1
            deltas[index] = [event["content_block"]["type"]]
        elif event["type"] == "content_block_delta":
            deltas[index].append(event["delta"]["type"])
        assert event.get("index", index) == index
    assert {index: list(dict.fromkeys(kinds)) for index, kinds in deltas.items()} == {
        0: ["thinking", "thinking_delta", "signature_delta"],
        1: ["text", "text_delta"],
        2: ["tool_use", "input_json_delta"],
        3: ["tool_use", "input_json_delta"],
    }
    assert kinds.count("content_block_stop") == 4
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_stop_reasons_match_original_api():
    async with scripted(always("one two three"), max_model_len=60) as server, client_for(server) as client:
        bare = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "?"}]}

        async def end(**settings):
            answer = await client.messages.create(**(bare | settings))
            async with client.messages.stream(**(bare | settings)) as stream:
                streamed = await stream.get_final_message()
            assert streamed.usage == answer.usage
            assert (streamed.stop_reason, streamed.stop_sequence) == (answer.stop_reason, answer.stop_sequence)
            assert [block.text for block in streamed.content] == [block.text for block in answer.content]
            return answer.stop_reason, answer.stop_sequence, "".join(block.text for block in answer.content)

        assert await end() == ("end_turn", None, "one two three")
        assert await end(stop_sequences=["zzz", " th"]) == ("stop_sequence", " th", "one two")
        assert await end(max_tokens=5) == ("max_tokens", None, "one t")
        long = [{"role": "user", "content": "x" * 36}]
        assert (await end(messages=long))[0] == "model_context_window_exceeded"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 59 maximum"):
            await end(messages=[{"role": "user", "content": "x" * 60}])


async def test_system_prompts_prefills_and_counts():
    async with scripted(always("x")) as server, client_for(server) as client:
        bare = {"model": "tiny", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
        cached = {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": "One."}, cached]
        count = await client.messages.count_tokens(**bare, system=system, tools=[ADD])
        answer = await client.messages.create(
            **bare, system=system, tools=[ADD], max_tokens=5, extra_headers={"anthropic-beta": "some-2027-01-01"}
        )
        assert count.input_tokens == answer.usage.input_tokens
        engine = server.frontend.engine
        text = engine.tokenizer.decode(engine.prompts[-1])
        assert text.endswith("<start>system:One.\n\nTwo.<end><start>user:a\n\nb<end><start>assistant:")
        await client.messages.create(
            model="tiny", max_tokens=5, messages=[*bare["messages"], {"role": "assistant", "content": "The answer is"}]
        )
        assert engine.tokenizer.decode(engine.prompts[-1]).endswith("<start>assistant:The answer is")
        models = await client.models.list()
        assert [model.id async for model in models] == ["tiny"]


async def test_hidden_thought_is_restored_by_signature():
    recorder = RequestRecorder()
    async with scripted(recorder=recorder) as server:
        async with client_for(server, base_url=root_url(server) + "/s/hidden") as client:
            settings = {"thinking": {"type": "adaptive", "display": "omitted"}}
            answers = [answer async for answer in run_agent(client, True, **settings)]
        assert [block.thinking for answer in answers for block in answer.content if block.type == "thinking"] == [
            "",
            "",
        ]
    assert one_row(recorder, "hidden")[0] == [f"<think>{FIRST}<end>", f"<think>{SECOND}<end>", f"{ANSWERS[2]}<end>"]


async def test_conversation_continues_over_other_protocol():
    recorder = RequestRecorder()
    async with scripted(recorder=recorder) as server, client_for(server, api_key=server.session_key("s")) as client:
        first = await client.messages.create(**ASK)
        thought, text, *calls = first.content
        messages = [
            {"role": "user", "content": "2+3?"},
            {
                "role": "assistant",
                "content": f"<think>{thought.thinking}</think>{text.text}",
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": "add", "arguments": json.dumps(call.input)},
                    }
                    for call in calls
                ],
            },
            *({"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls),
        ]
        tool = {
            "type": "function",
            "function": {"name": "add", "description": "Adds", "parameters": ADD["input_schema"]},
        }
        async with httpx.AsyncClient() as plain:
            body = {"model": "tiny", "messages": messages, "tools": [tool]}
            answer = await plain.post(server.session_url("s") + "/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert server.frontend.take_metrics()["endpoint/exact_turns"] == 1
    assert one_row(recorder, "s")[0] == [f"<think>{FIRST}<end>", f"<think>{SECOND}<end>"]


async def test_errors_match_original_api(chat_engine, chat_model):
    async with serving(chat_engine, chat_model, api_key="secret", max_requests=0) as server:
        async with client_for(server) as client:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                await client.messages.create(**ASK)
            assert raised.value.body["error"]["type"] == "authentication_error"
        async with client_for(server, api_key=None, auth_token="secret") as client:
            with pytest.raises(anthropic.RateLimitError) as raised:
                await client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "a"}])
            assert raised.value.response.headers["Retry-After"] == "1"
            with pytest.raises(anthropic.NotFoundError, match="served models: tiny") as raised:
                await client.messages.create(**(ASK | {"model": "claude"}))
            assert raised.value.body["error"]["type"] == "not_found_error"
            assert raised.value.request_id == raised.value.body["request_id"]
        async with client_for(server, base_url=server.url) as client:
            with pytest.raises(anthropic.NotFoundError, match="/v1"):
                await client.messages.create(**ASK)


async def test_failure_before_and_during_stream():
    async with scripted(always("y" * 100)) as server, client_for(server) as client:
        break_streams(server, 30)
        settings = {"model": "tiny", "max_tokens": 90, "stream": True}
        with pytest.raises(anthropic.APIStatusError) as raised:
            stream = await client.messages.create(messages=[{"role": "user", "content": "x"}], **settings)
            assert (await anext(aiter(stream))).type == "message_start"
            async for _ in stream:
                pass
        assert raised.value.body["error"]["type"] == "api_error"
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(messages=[{"role": "user", "content": "x" * 40}], **settings)
