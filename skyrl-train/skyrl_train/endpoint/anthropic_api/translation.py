"""Conversion of Messages API requests to chat requests. An earlier response that a client sends back in its original
blocks becomes the original assistant message, so the sampled tokens are reused.
"""

import base64
from collections.abc import Sequence
from itertools import groupby

from skyrl_train.endpoint.anthropic_api.schema import (
    AnthropicMessage,
    Block,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UnsupportedBlock,
)
from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.endpoint.openai_api.schema import ChatRequest, parse_fields
from skyrl_train.endpoint.openai_api.thoughts import add_thought
from skyrl_train.types import JsonObject

_SIGNATURE, _HIDDEN_THOUGHT = "skyrl-thought", "skyrl-thought."
_PARAGRAPH = "\n\n"
"""Separator of the text blocks of a system prompt or user message."""


def convert_request(request: CountTokensRequest) -> ChatRequest:
    """Translate a request. Raises ApiError."""
    values: JsonObject = {"model": request.model, "messages": _convert_messages(request)}
    if request.tools:
        values["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema.model_dump() if tool.input_schema else {},
                }
                | ({} if tool.strict is None else {"strict": tool.strict}),
            }
            for tool in request.tools
        ]
        if request.tool_choice is not None:
            values |= _convert_tool_choice(request.tool_choice)
    values["continue_final_message"] = request.messages[-1].role == "assistant"
    if kwargs := _build_template_kwargs(request):
        values["chat_template_kwargs"] = kwargs
    if request.output_config is not None and (form := request.output_config.format) is not None:
        json_schema = {"name": "output", "schema": form.json_schema, "strict": True}
        values["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if isinstance(request, MessagesRequest):
        values |= _convert_sampling(request)
    return parse_fields(ChatRequest, values)


def _convert_sampling(request: MessagesRequest) -> JsonObject:
    values: JsonObject = {"max_tokens": request.max_tokens, "stream": bool(request.stream)}
    values |= {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(request, name)) not in (None, 0) or (name == "temperature" and value is not None)
    }
    if request.top_p == 0:  # a nucleus of only the most likely token
        values["top_k"] = 1
    if request.stop_sequences:
        values["stop"] = request.stop_sequences
    return values


def _convert_tool_choice(choice: ToolChoice) -> JsonObject:
    values: JsonObject = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        return values | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return values | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _build_template_kwargs(request: CountTokensRequest) -> JsonObject:
    """Build the variables that chat templates of thinking models read."""
    kwargs: JsonObject = {}
    if request.thinking is not None:
        kwargs["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs


def _convert_messages(request: CountTokensRequest) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if request.system:
        texts = [request.system] if isinstance(request.system, str) else [part.text for part in request.system]
        messages.append({"role": "system", "content": _PARAGRAPH.join(texts)})
    if request.messages[0].role == "assistant":
        raise build_refusal('messages: first message must use the "user" role')
    pending: set[str] = set()
    for role, turn in groupby(enumerate(request.messages), key=lambda item: item[1].role):
        # Consecutive messages of one role are one turn, as with Anthropic.
        placed = [_iter_parts(index, message, index + 1 == len(request.messages)) for index, message in turn]
        parts = [part for message in placed for part in message]
        if role == "assistant":
            messages.append(_convert_assistant(parts))
            pending = {part.id for _, part in parts if isinstance(part, ToolUseBlock)}
            continue
        if role == "user":
            messages += _convert_tool_results(parts, pending)
            pending = set()
        if texts := _extract_texts(parts):
            messages.append({"role": role, "content": _PARAGRAPH.join(texts)})
    if pending:
        raise build_refusal(
            f"messages.{len(request.messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {', '.join(sorted(pending))}"
        )
    return messages


def _iter_parts(index: int, message: AnthropicMessage, is_last: bool) -> list[tuple[str, Block]]:
    """Yield a message's parts with their paths in the request. Raises ApiError for parts that this role cannot have."""
    belongs = {
        "user": (TextBlock, ToolResultBlock),
        "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
        "system": (TextBlock,),
    }[message.role]
    placed = [(f"messages.{index}.content.{number}", part) for number, part in enumerate(message.parts)]
    for place, part in placed:
        if isinstance(part, UnsupportedBlock):
            raise _build_unsupported_error(place, part)
        if not isinstance(part, belongs):
            raise build_refusal(
                f"{place}: blocks of type {part.type!r} are not allowed in messages of role {message.role!r}"
            )
        if isinstance(part, TextBlock) and not part.text and message.role != "assistant":
            raise build_refusal(f"{place}: text content blocks must be non-empty")
    # An assistant's text may be empty: a model in training may end immediately, and the agent sends that back.
    if not placed and message.role != "assistant":
        raise build_refusal(f"messages.{index}: all messages must have non-empty content")
    last = placed[-1][1] if placed and is_last and message.role == "assistant" else None
    if isinstance(last, TextBlock) and last.text != last.text.rstrip():
        raise build_refusal("messages: final assistant content cannot end with trailing whitespace")
    return placed


def _build_unsupported_error(place: str, part: UnsupportedBlock) -> ApiError:
    return build_refusal(f"{place}: blocks of type {part.type!r} are not supported: the served model is text-only")


def _extract_texts(parts: Sequence[tuple[str, Block]]) -> list[str]:
    return [part.text for _, part in parts if isinstance(part, TextBlock)]


def _convert_assistant(parts: Sequence[tuple[str, Block]]) -> JsonObject:
    content = "".join(_extract_texts(parts))
    if thoughts := [_decode_thought(part) for _, part in parts if isinstance(part, ThinkingBlock)]:
        content = add_thought("".join(thoughts), content)
    message: JsonObject = {"role": "assistant", "content": content}
    if calls := [part for _, part in parts if isinstance(part, ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def _convert_tool_results(parts: Sequence[tuple[str, Block]], pending: set[str]) -> list[JsonObject]:
    """Convert the tool results of a user turn. There must be exactly one result for each preceding call."""
    messages: list[JsonObject] = []
    missing = set(pending)
    for place, part in parts:
        if not isinstance(part, ToolResultBlock):
            continue
        if part.tool_use_id not in missing:
            rule = (
                "each `tool_use` must have a single result"
                if part.tool_use_id in pending
                else ("Each `tool_result` block must have a corresponding `tool_use` block in the previous message.")
            )
            raise build_refusal(
                f"{place}: unexpected `tool_use_id` found in `tool_result` blocks: {part.tool_use_id}. {rule}"
            )
        missing.remove(part.tool_use_id)
        messages.append({"role": "tool", "tool_call_id": part.tool_use_id, "content": _convert_result(place, part)})
    if missing:
        raise build_refusal(
            f"{parts[0][0].rsplit('.', 2)[0]}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {', '.join(sorted(missing))}. Each `tool_use` block must have a corresponding `tool_result` block "
            "in the next message."
        )
    return messages


def _convert_result(place: str, part: ToolResultBlock) -> str:
    if part.content is None or isinstance(part.content, str):
        return part.content or ""
    texts = []
    for number, inner in enumerate(part.content):
        if isinstance(inner, UnsupportedBlock):
            raise _build_unsupported_error(f"{place}.content.{number}", inner)
        texts.append(inner.text)
    return "\n".join(texts)


def compute_signature(thought: str, is_hidden: bool) -> str:
    """Return the signature of a thinking block. If the text is not shown, the signature contains it."""
    if not is_hidden:
        return _SIGNATURE
    return _HIDDEN_THOUGHT + base64.b64encode(thought.encode()).decode()


def _decode_thought(part: ThinkingBlock) -> str:
    if part.thinking or not part.signature.startswith(_HIDDEN_THOUGHT):
        return part.thinking
    try:
        return base64.b64decode(part.signature.removeprefix(_HIDDEN_THOUGHT), validate=True).decode()
    except ValueError as error:
        raise build_refusal("thinking: Invalid `signature` in `thinking` block") from error
