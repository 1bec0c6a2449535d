"""Malformed requests of each protocol: status and error type are the original's, and the server goes on."""

import re
from typing import Any

import httpx
import pytest

from .protocol_kit import always, scripted

HUGE = 10**30
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
NO_JSON = [
    (b"", "empty"),
    (b"{", "not valid JSON"),
    (b"[]", "JSON object"),
    (b'"a"', "JSON object"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"model": "\\ud800"}', "not valid JSON"),
    (b'{"model": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "not valid JSON"),
    (b'{"model": NaN', "not valid JSON"),
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"name": "add", "input_schema": {"type": "object"}} | changes]}


def messages(*given: Any) -> dict[str, Any]:
    return {"messages": list(given)}


ADD = tool()
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
THOUGHT = {"type": "thinking", "thinking": "", "signature": "skyrl-thought.!"}
MESSAGES = [
    ({"max_tokens": ...}, "max_tokens: Field required"),
    ({"model": ...}, "model: Field required"),
    ({"messages": ...}, "messages: Field required"),
    (messages(), "at least one message is required"),
    ({"messages": "hi"}, "messages: Input should be a valid list"),
    ({"messages": None}, "messages: Input should be a valid list"),
    (messages("hi"), "messages.0: Input should be"),
    (messages({"role": "user"}), "messages.0.content: Field required"),
    (messages({"content": "a"}), "messages.0.role: Field required"),
    (messages({"role": "robot", "content": "a"}), "messages.0.role: Input should be 'user', 'assistant'"),
    (messages(user(5)), "messages.0.content: "),
    (messages(user([])), "messages.0: all messages must have non-empty content"),
    (messages(user("")), "text content blocks must be non-empty"),
    (messages(user([{"type": "text", "text": ""}])), "messages.0.content.0: text content blocks must be non-empty"),
    (messages(user([{"type": "text"}])), "messages.0.content.0.text: Field required"),
    (messages(user([{"text": "a"}])), "messages.0.content.0: Unable to extract tag"),
    (messages(user([{"type": "poem", "text": "a"}])), "messages.0.content.0: Input tag 'poem'"),
    (messages(user([{"type": "text", "text": "a", "more": 1}])), "messages.0.content.0.more: Extra inputs"),
    (messages({"role": "user", "content": "a", "name": "b"}), "messages.0.name: Extra inputs are not permitted"),
    (messages(user([IMAGE])), "messages.0.content.0: blocks of type 'image' are not supported"),
    (messages(user([{"type": "document", "source": {}}])), "blocks of type 'document' are not supported"),
    (messages(user([{"type": "search_result"}])), "'search_result' are not supported"),
    (messages(user("a"), assistant({"type": "redacted_thinking", "data": "x"})), "'redacted_thinking' are not"),
    (messages(user("a"), assistant({"type": "server_tool_use", "id": "x"})), "'server_tool_use' are not supported"),
    (messages(user([THOUGHT])), "blocks of type 'thinking' are not allowed in messages of role 'user'"),
    (messages(user("a"), assistant(RESULT)), "'tool_result' are not allowed in messages of role 'assistant'"),
    (messages(user([USE])), "'tool_use' are not allowed in messages of role 'user'"),
    (messages(user("a"), {"role": "system", "content": [IMAGE]}), "not supported"),
    (messages(assistant({"type": "text", "text": "a"})), 'first message must use the "user" role'),
    (messages(user("a"), assistant({"type": "text", "text": "b "})), "cannot end with trailing whitespace"),
    (messages(user("a"), assistant({"type": "thinking", "thinking": "b"})), "signature: Field required"),
    (messages(user("a"), assistant(THOUGHT, {"type": "text", "text": "b"})), "Invalid `signature`"),
    (messages(user("a"), assistant(USE)) | ADD, "messages.1: `tool_use` ids were found without `tool_result`"),
    (messages(user("a"), assistant(USE), user("b")) | ADD, "messages.2: `tool_use` ids were found without"),
    (messages(user([RESULT])), "unexpected `tool_use_id` found in `tool_result` blocks: t1"),
    (messages(user("a"), assistant(USE), user([RESULT, RESULT])), "must have a single result"),
    (messages(user("a"), assistant(USE), user([RESULT | {"content": [IMAGE]}])), "messages.2.content.0.content.0: "),
    (messages(user("a"), assistant(USE | {"input": "5"}), user([RESULT])), "messages.1.content.0.input: "),
    (messages(user("a"), assistant(USE | {"id": ""}), user([RESULT])), "messages.1.content.0.id: "),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"max_tokens": -1}, "max_tokens: "),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 1.5}, "max_tokens: "),
    ({"max_tokens": HUGE}, "max_tokens: "),
    ({"temperature": 1.1}, "temperature: Input should be less than or equal to 1"),
    ({"temperature": -0.1}, "temperature: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_p": 1.5}, "top_p: "),
    ({"top_k": -1}, "top_k: "),
    ({"stop_sequences": "a"}, "stop_sequences: Input should be a valid list"),
    ({"stop_sequences": [" "]}, "stop_sequences.0: each stop sequence must contain non-whitespace"),
    ({"stop_sequences": [5]}, "stop_sequences.0: "),
    ({"stream": "yes"}, "stream: "),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"system": 5}, "system: "),
    ({"metadata": "me"}, "metadata: "),
    ({"max_tokens_to_sample": 5}, "max_tokens_to_sample: Extra inputs are not permitted"),
    ({"n": 2}, "n: Extra inputs are not permitted"),
    ({"tools": {}}, "tools: Input should be a valid list"),
    ({"tools": [{"name": "add"}]}, "tools.0.custom.input_schema: Field required"),
    (tool(input_schema={"type": "array"}), "tools.0.input_schema.type: Input should be 'object'"),
    (tool(input_schema={}), "tools.0.input_schema.type: Field required"),
    (tool(name="a b"), "tools.0.name: String should match pattern"),
    (tool(name=""), "tools.0.name: String should match pattern"),
    ({"tools": ADD["tools"] * 2}, "Tool names must be unique"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run by Anthropic's servers"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "run by Anthropic's servers"),
    (ADD | {"tool_choice": "auto"}, "tool_choice: "),
    (ADD | {"tool_choice": {"type": "maybe"}}, "tool_choice.type: "),
    (ADD | {"tool_choice": {"type": "tool"}}, "tool_choice.tool.name: "),
    (ADD | {"tool_choice": {"type": "tool", "name": "sub"}}, "Tool 'sub' not found in provided tools"),
    ({"tool_choice": {"type": "any"}}, "may only be specified while providing tools"),
    ({"thinking": {"type": "enabled"}}, "thinking.enabled.budget_tokens: "),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "greater than or equal to 1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 1500}, "must be greater than"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type: "),
    ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported here"),
    ({"container": "c1"}, "container: not supported here"),
    ({"service_tier": "gold"}, "service_tier: "),
    (messages(user("x" * 200)), "prompt is too long: 2\\d\\d tokens > 127 maximum"),
]

FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


RESPONSES = [
    ({"model": ...}, "model: Field required"),
    ({"input": ...}, "input: Field required"),
    ({"input": ""}, "input must not be empty"),
    (items(), "input must not be empty"),
    ({"input": 5}, "input"),
    ({"input": {}}, "input"),
    (items("hi"), "input"),
    (items({}), "input\\[0\\]: None is not supported"),
    (items({"type": "poem"}), "input\\[0\\]: 'poem' is not supported"),
    (items({"type": "message"}), "input\\[0\\].role: Field required"),
    (items({"role": "user"}), "input\\[0\\].content: Field required"),
    (items({"role": "robot", "content": "a"}), "input\\[0\\].role: "),
    (items(user(5)), "input\\[0\\].content"),
    (items(user([{"type": "input_text"}])), "input\\[0\\].content.*text: Field required"),
    (items(user([{"type": "poem", "text": "a"}])), "input\\[0\\].content"),
    (items(user([{"text": "a"}])), "input\\[0\\].content"),
    (items(user([{"type": "input_image", "image_url": "x"}])), "content\\[0\\]: 'input_image' is not supported"),
    (items(user([{"type": "input_file", "file_id": "x"}])), "'input_file' is not supported"),
    (items(user([{"type": "input_audio"}])), "'input_audio' is not supported"),
    (items({"type": "item_reference", "id": "msg_1"}), "'item_reference' is not supported"),
    (items({"type": "web_search_call", "id": "x"}), "'web_search_call' is not supported"),
    (items({"type": "computer_call_output"}), "'computer_call_output' is not supported"),
    (items(CALL), "No tool output found for function call c1"),
    (items(OUTPUT), "No tool call found for function call output with call_id c1"),
    (items(CALL, OUTPUT, OUTPUT), "No tool call found"),
    (items(CALL | {"arguments": {}}, OUTPUT), "input\\[0\\].arguments: "),
    (items({"type": "function_call", "name": "add", "arguments": "{}"}), "input\\[0\\].call_id: Field required"),
    (items(CALL | {"name": ""}, OUTPUT), "input\\[0\\].name: "),
    (items(CALL, OUTPUT | {"output": 5}), "input\\[1\\].output"),
    (items(CALL, OUTPUT | {"output": [{"type": "input_image"}]}), "'input_image' is not supported"),
    (items({"type": "reasoning", "content": "a"}), "input\\[0\\].content: "),
    (items({"type": "reasoning", "summary": [], "encrypted_content": "é"}), "could not be verified"),
    ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found"),
    ({"previous_response_id": 5}, "previous_response_id: "),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
    ({"max_output_tokens": -5}, "max_output_tokens: "),
    ({"max_output_tokens": "5"}, "max_output_tokens: "),
    ({"max_output_tokens": HUGE}, "max_output_tokens: "),
    ({"max_tokens": 5}, "unknown field max_tokens"),
    ({"messages": []}, "unknown field messages"),
    ({"temperature": 2.5}, "temperature: "),
    ({"temperature": -1}, "temperature: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"top_p": 1.1}, "top_p: "),
    ({"top_logprobs": 5}, "top_logprobs=5 is not supported"),
    ({"truncation": "auto"}, "truncation='auto' is not supported"),
    ({"background": True}, "background=True is not supported"),
    ({"conversation": "conv_1"}, "conversation='conv_1' is not supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt=.* is not supported"),
    ({"stream": "yes"}, "stream: "),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options requires stream=true"),
    ({"store": "yes"}, "store: "),
    ({"instructions": 5}, "instructions: "),
    ({"metadata": {"a": 1}}, "metadata.a: "),
    ({"include": "all"}, "include: "),
    ({"include": ["message.output_text.logprobs"]}, "log-probs are available from /v1/chat/completions"),
    ({"tools": {}}, "tools: "),
    ({"tools": [{"name": "add"}]}, "tools.0.type: Field required"),
    ({"tools": [{"type": "function"}]}, "tools\\[0\\].name: Field required"),
    ({"tools": [{"type": "web_search"}]}, "'web_search' are run by OpenAI's servers"),
    ({"tools": [{"type": "code_interpreter", "container": {}}]}, "'code_interpreter' are run"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "'mcp' are run by"),
    ({"tools": [FUNCTION | {"parameters": "x"}]}, "tools.0.parameters: "),
    ({"tool_choice": "required"}, "tool_choice is only allowed when tools are given"),
    ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice=.* is not supported"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice=.* is not supported"),
    ({"tools": [FUNCTION], "tool_choice": 5}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type: "),
    ({"text": {"format": {"type": "json_schema"}}}, "json_schema needs a name and a schema"),
    ({"text": {"colour": "red"}}, "text.colour: Extra inputs"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort: "),
    ({"reasoning": "high"}, "reasoning: "),
    ({"user": 5}, "user: "),
    (items(user("x" * 200)), "maximum context length is 128"),
]

CHAT_TOOL = {"type": "function", "function": {"name": "add"}}
CHAT = [
    ({"model": ...}, "model: Field required"),
    ({"messages": ...}, "messages: Field required"),
    (messages(), "at least one message"),
    ({"messages": "hi"}, "messages: "),
    ({"messages": None}, "messages: "),
    (messages("hi"), "messages.0: "),
    (messages({"content": "a"}), "messages.0.role: Field required"),
    (messages({"role": "robot", "content": "a"}), "messages.0.role: "),
    (messages({"role": 5, "content": "a"}), "messages.0.role: "),
    (messages(user(5)), "messages.0.content"),
    (messages(user({"text": "a"})), "messages.0.content"),
    (messages(user([{"type": "image_url", "image_url": {"url": "x"}}])), "only parts of type text"),
    (messages(user([{"type": "input_audio"}])), "only parts of type text"),
    (messages(user([{"type": "text", "text": 5}])), "only parts of type text"),
    (messages(user([{}])), "only parts of type text"),
    (messages(user("a"), {"role": "assistant", "tool_calls": "x"}), "messages.1.tool_calls: "),
    (messages(user("a"), {"role": "assistant", "tool_calls": [{}]}), "tool_calls.0.function: Field required"),
    (messages(user("a"), {"role": "assistant", "tool_calls": [{"function": {}}]}), "function.name: Field required"),
    (messages(user("a") | {"name": 5}), "messages.0.name: "),
    (messages({"role": "tool", "content": "a", "tool_call_id": 5}), "tool_call_id: "),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": -5}, "max_tokens must be at least 1"),
    ({"max_tokens": "5"}, "max_tokens: "),
    ({"max_tokens": 1.5}, "max_tokens: "),
    ({"max_tokens": HUGE}, "max_tokens: "),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "set the same limit"),
    ({"max_completion_tokens": 0}, "must be at least 1"),
    ({"temperature": -1}, "temperature must be"),
    ({"temperature": "hot"}, "temperature: "),
    ({"temperature": [1]}, "temperature: "),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"top_p": 1.5}, "top_p must be"),
    ({"top_k": HUGE}, "top_k: "),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n: Input should be greater than or equal to 1"),
    ({"n": 1000}, "n: Input should be less than or equal to 128"),
    ({"n": "2"}, "n: "),
    ({"seed": "one"}, "seed: "),
    ({"seed": HUGE}, "seed: "),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0: "),
    ({"stop_token_id": [1]}, "did you mean stop_token_ids"),
    ({"stream": "yes"}, "stream: "),
    ({"stream_options": {"include_usage": True}}, "stream_options requires stream=true"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour: "),
    ({"prompt": "a"}, "unknown field prompt"),
    ({"input": "a"}, "unknown field input"),
    ({"tools": {}}, "tools: "),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: "),
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tools": [CHAT_TOOL | {"function": "x"}]}, "tools.0.function: "),
    ({"functions": [{"name": "add"}]}, "functions=.* is not supported; use tools"),
    ({"function_call": "auto"}, "function_call=.* is not supported; use tool_choice"),
    ({"modalities": ["audio"]}, "modalities=.* is not supported"),
    ({"audio": {"voice": "x"}}, "audio=.* is not supported"),
    ({"web_search_options": {}}, "web_search_options=.* is not supported"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "pass one of them"),
    ({"chat_template_kwargs": {"messages": []}}, "must not contain messages"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs: "),
    ({"metadata": "me"}, "metadata: "),
    ({"user": 5}, "user: "),
    (messages(user("x" * 200)), "maximum context length is 128"),
]

PROTOCOLS = {
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [user("a")]}, MESSAGES),
    "responses": ("/v1/responses", {"model": "tiny", "input": "a"}, RESPONSES),
    "chat": ("/v1/chat/completions", {"model": "tiny", "messages": [user("a")]}, CHAT),
}


def is_error_of(protocol: str, answer: httpx.Response, status: int, kind: str) -> bool:
    """Test the shape that the protocol's own client reads."""
    body = answer.json()
    error = body.get("error") or {}
    if protocol == "messages":
        shape = body["type"] == "error" and set(error) == {"type", "message"} and bool(body.get("request_id"))
    else:
        shape = set(error) == {"message", "type", "param", "code"}
    return shape and (answer.status_code, error["type"]) == (status, kind)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_malformed_request_errors_match_original_api(protocol):
    path, good, changes = PROTOCOLS[protocol]
    rows = [(good | change, says) for change, says in changes] + NO_JSON
    assert len(rows) >= 60
    async with scripted(always("x"), max_model_len=128) as server:
        root = server.url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, timeout=20) as client:
            wrong = []
            for body, says in rows:
                if isinstance(body, dict):
                    given = {name: value for name, value in body.items() if value is not ...}
                    answer = await client.post(path, json=given)
                else:
                    answer = await client.post(path, content=body)
                if not is_error_of(protocol, answer, 400, "invalid_request_error") or not _says(answer, says):
                    wrong.append(f"{str(body)[:150]}: {answer.status_code} {answer.text[:200]}, not {says!r}")
            assert not wrong, "\n".join(wrong)
            not_found = await client.post(path, json=good | {"model": "gpt-7"})
            kind = "not_found_error" if protocol == "messages" else "invalid_request_error"
            assert is_error_of(protocol, not_found, 404, kind)
            assert (await client.post(path, json=good)).status_code == 200


def _says(answer: httpx.Response, says: str) -> bool:
    return re.search(says, answer.json()["error"]["message"]) is not None
