"""Forms of answers asked for by Messages and Responses are those of chat, whose own tests show that they hold."""

import json

import pytest

from skyrl_train.endpoint.anthropic_api import schema as messages
from skyrl_train.endpoint.anthropic_api import translation as of_messages
from skyrl_train.endpoint.openai_api import responses_schema, responses_translation
from skyrl_train.endpoint.openai_api.schema import ChatRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}


def by_messages(**fields) -> ChatRequest:
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]} | fields
    return of_messages.convert_request(messages.parse_request(messages.MessagesRequest, json.dumps(body).encode()))


def by_responses(**fields) -> ChatRequest:
    raw = json.dumps({"model": "tiny", "input": "?"} | fields).encode()
    request = responses_schema.parse_responses_request(raw)
    return responses_translation.convert_request(request, [{"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "add"}, (NAMED, None)),
        ({"type": "none"}, ("none", None)),
    ],
    ids=str,
)
def test_anthropic_tool_choice_is_translated(choice, expected):
    chat = by_messages(tools=[{"name": "add", "input_schema": SCHEMA}], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected
    assert [tool.model_dump() for tool in chat.tools or []] == [ADD]


@pytest.mark.parametrize("choice, expected", [("required", "required"), ({"type": "function", "name": "add"}, NAMED)])
def test_responses_tool_choice_is_translated(choice, expected):
    tool = {"type": "function", "name": "add", "parameters": SCHEMA}
    chat = by_responses(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)
    assert [tool.model_dump() for tool in chat.tools or []] == [ADD]


def test_response_schemas_are_translated():
    chat = by_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"})
    assert chat.response_format["json_schema"]["schema"] == SCHEMA
    assert chat.chat_template_kwargs == {"reasoning_effort": "high"}
    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}
    chat = by_responses(text={"format": form}, reasoning={"effort": "low"})
    assert chat.response_format["json_schema"] == {"name": "sum", "schema": SCHEMA, "strict": True}
    assert chat.reasoning_effort == "low"
    assert by_responses(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert by_responses(text={"format": {"type": "text"}}).response_format is None


@pytest.mark.parametrize("given, thinks", [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_anthropic_thinking_sets_template_variable(given, thinks):
    budget = {"budget_tokens": 1024} if given == "enabled" else {}
    chat = by_messages(thinking={"type": given, **budget}, max_tokens=2000)
    assert chat.chat_template_kwargs == {"enable_thinking": thinks}
