"""Choice of the tool format, and messages of the API for a chat template."""

import pytest

from skyrl_train.endpoint.errors import ApiError
from skyrl_train.endpoint.openai_api.schema import Message
from skyrl_train.endpoint.openai_api.tool_calls import (
    convert_messages_for_template,
    resolve_tool_syntax,
)

from .conftest import TOOL_TEMPLATE


def test_tool_syntax_follows_chat_template():
    assert resolve_tool_syntax("auto", TOOL_TEMPLATE) == "hermes"
    assert resolve_tool_syntax("auto", 'Respond with {"name": …, "parameters": …}') == "llama3_json"
    assert resolve_tool_syntax("auto", None) == "hermes"
    assert resolve_tool_syntax("llama3_json", TOOL_TEMPLATE) == "llama3_json"


def test_template_receives_arguments_as_object_and_parts_as_text():
    messages = [
        Message.model_validate({"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}),
        Message.model_validate(
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            }
        ),
    ]
    first, second = convert_messages_for_template(messages)
    assert first == {"role": "system", "content": "aa"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    with pytest.raises(ApiError, match="type text"):
        convert_messages_for_template([Message(role="user", content=[{"type": "image_url"}])])
