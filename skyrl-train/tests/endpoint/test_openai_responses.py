"""OpenAI's own client against the Responses API of the endpoint."""

import httpx
import openai
import pytest

from skyrl_train.endpoint.openai_api.responses import ResponseStore
from skyrl_train.endpoint.recorder import RequestRecorder

from .conftest import client_of
from .protocol_kit import ANSWERS, FIRST, SECOND, THOUGHT, always, break_streams, one_row, scripted

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds",
    "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    "strict": None,
}
ASK = {"model": "tiny", "tools": [ADD], "max_output_tokens": 400}
DRAWN = [f"<think>{FIRST}<end>", f"<think>{SECOND}<end>", f"{ANSWERS[2]}<end>"]


async def respond(client, streams: bool, **asked):
    if not streams:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        return await stream.get_final_response()


def results_of(response) -> list[dict]:
    """Return the next input: results of the calls, or thanks."""
    calls = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
    return results or [{"role": "user", "content": "Thanks"}]


@pytest.mark.first_case
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("keeps", ["items", "encrypted", "server"])
async def test_reasoning_and_parallel_tools_form_single_row(streams, keeps):
    recorder = RequestRecorder()
    async with (
        scripted(recorder=recorder) as server,
        client_of(server, api_key=server.session_key("s")) as client,
    ):
        items, responses, previous = [{"role": "user", "content": "2+3?"}], [], {}
        for _ in range(3):
            more = {"include": ["reasoning.encrypted_content"], "store": False} if keeps == "encrypted" else {}
            response = await respond(client, streams, **ASK, input=items, **more, **previous)
            responses.append(response)
            if keeps == "server":
                items, previous = results_of(response), {"previous_response_id": response.id}
                continue
            returned = [item.model_dump(exclude_none=True) for item in response.output]
            for item in returned if keeps == "encrypted" else ():
                if item["type"] == "reasoning":
                    item.pop("content")
            items = [*items, *returned, *results_of(response)]
        assert server.frontend.take_metrics()["endpoint/rendered_turns"] == 0

    first, second, third = responses
    reasoning, message, *calls = first.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", THOUGHT)
    assert (message.type, first.output_text) == ("message", "Let me see.")
    assert [call.arguments for call in calls] == ['{"a": 2, "b": 3}', '{"b": 4, "a": "é"}']
    assert len({call.call_id for call in calls}) == 2
    assert second.output_text == "It is 5 and 7."
    assert [item.type for item in third.output] == ["message"]
    assert {response.status for response in responses} == {"completed"}
    assert first.usage.output_tokens_details.reasoning_tokens == len(THOUGHT)
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert one_row(recorder, "s")[0] == DRAWN


async def test_stream_events_match_original_api():
    async with scripted() as server, client_of(server) as client:
        stream = await client.responses.create(**ASK, input="2+3?", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    block = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    assert [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1] or not kind.endswith(".delta")] == [
        "created",
        "in_progress",
        *(name.format("reasoning_text") for name in block),
        *(name.format("output_text") for name in block),
        *call,
        *call,
        "completed",
    ]
    final = events[-1].response
    assert final.output == [event.item for event in events if event.type == "response.output_item.done"]
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert {getattr(event, "item_id", None) or event.item.id for event in own} == {item.id}
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)


async def test_truncated_response_is_incomplete():
    async with scripted(always("<think>one two three four")) as server, client_of(server) as client:
        asked = {"model": "tiny", "input": "?", "max_output_tokens": 16}
        whole = await client.responses.create(**asked)
        *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
        assert last.type == "response.incomplete"
        for response in (whole, last.response):
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]


async def test_instructions_precede_input_and_are_per_request():
    async with scripted(always("x")) as server, client_of(server) as client:
        engine = server.frontend.engine
        parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
        first = await client.responses.create(
            model="tiny",
            instructions="One.",
            input=[{"role": "developer", "content": "Two."}, {"role": "user", "content": parts}],
            metadata={"run": "1"},
        )
        assert engine.tokenizer.decode(engine.prompts[-1]) == (
            "<start>system:One.\n\nTwo.<end><start>user:a\n\nb<end><start>assistant:"
        )
        assert first.metadata == {"run": "1"}
        await client.responses.create(model="tiny", input="c", previous_response_id=first.id)
        assert engine.tokenizer.decode(engine.prompts[-1]) == (
            "<start>system:Two.<end><start>user:a\n\nb<end><start>assistant:x<end><start>user:c<end><start>assistant:"
        )


async def test_custom_tool_receives_text():
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    async with scripted(always(call)) as server, client_of(server) as client:
        for streams in (False, True):
            response = await respond(client, streams, model="tiny", input="?", tools=[custom])
            [item] = response.output
            assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin")
        output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
        again = await client.responses.create(
            model="tiny", input=[output], tools=[custom], previous_response_id=response.id
        )
        assert again.status == "completed"


async def test_namespaced_tools_are_called_by_both_names():
    call = '<tool_call>{"name": "maths__add", "arguments": {"a": 1}}</tool_call>'
    space = {"type": "namespace", "name": "maths", "description": "Numbers", "tools": [ADD]}
    recorder = RequestRecorder()
    async with (
        scripted(always(call), recorder=recorder) as server,
        client_of(server, base_url=server.session_url("s")) as client,
    ):
        response = await client.responses.create(model="tiny", input="?", tools=[space])
        [item] = response.output
        assert (item.namespace, item.name, item.arguments) == ("maths", "add", '{"a": 1}')
        output = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
        again = [{"role": "user", "content": "?"}, item.model_dump(exclude_none=True), output]
        await client.responses.create(model="tiny", input=again, tools=[space])
    assert one_row(recorder, "s")[0] == [f"{call}<end>", f"{call}<end>"]


async def test_stored_responses_belong_to_session_and_are_deletable():
    async with scripted(always("x")) as server, client_of(server, api_key=server.session_key("a")) as client:
        stored = await client.responses.create(model="tiny", input="c")
        assert (await client.responses.retrieve(stored.id)).output_text == "x"
        other = client.with_options(api_key=server.session_key("b"))
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(stored.id)
        with pytest.raises(openai.BadRequestError, match="not found") as raised:
            await other.responses.create(model="tiny", input="c", previous_response_id=stored.id)
        assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")
        await client.responses.delete(stored.id)
        for name in (stored.id, (await client.responses.create(model="tiny", input="c", store=False)).id):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(name)


def test_full_store_evicts_oldest_responses():
    store = ResponseStore(max_bytes=400)
    for name in ("a", "b", "c"):
        store.keep({"id": name}, [{"role": "user", "content": "x" * 100}], None)
    assert store.get_items("c", None)
    with pytest.raises(Exception, match="not found"):
        store.get_items("a", None)
    store.delete("b", None)
    assert store._num_bytes == store._stored["c"].num_bytes


async def test_failure_during_stream_is_last_event():
    async with scripted(always("y" * 100)) as server, client_of(server) as client:
        break_streams(server, 50)
        stream = await client.responses.create(model="tiny", input="?", stream=True)
        events = [event async for event in stream]
        assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "server_error")
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="tiny", input="?" * 60, stream=True)
        async with httpx.AsyncClient() as plain:
            wrong = await plain.post(server.url.removesuffix("/v1") + "/responses", json={})
            assert "must end in /v1" in wrong.json()["error"]["message"]
