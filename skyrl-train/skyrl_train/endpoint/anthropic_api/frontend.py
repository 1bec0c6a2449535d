"""Anthropic's Messages API over the endpoint's chat requests. Independent of HTTP."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.anthropic_api.errors import build_error_body
from skyrl_train.endpoint.anthropic_api.schema import CountTokensRequest, MessagesRequest, parse_request
from skyrl_train.endpoint.anthropic_api.translation import compute_signature, convert_request
from skyrl_train.endpoint.errors import ApiError
from skyrl_train.endpoint.openai_api.answer_parts import (
    BlockKind,
    ChatTurn,
    PartsWriter,
    ResponseParts,
    format_arguments,
    generate_id,
)
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.openai_api.payloads import Payload

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicFrontend:
    """Request handlers of the Messages API."""

    def __init__(self, frontend: OpenAIFrontend):
        self._frontend = frontend

    async def messages(self, raw: bytes, session: str | None = None) -> Payload | AsyncIterator[str]:
        """Handle `POST /v1/messages`. Returns the message, or its events for a stream. Raises ApiError."""
        request = parse_request(MessagesRequest, raw)
        turn = await ChatTurn.prepare(self._frontend, convert_request(request), raw, session)
        writer = MessageWriter(
            num_prompt_tokens=turn.num_prompt_tokens,
            model=request.model,
            hides_thoughts=request.thinking is not None and request.thinking.display == "omitted",
            context_length=await self._frontend.get_context_length(),
        )
        return turn.stream_events(writer) if request.stream else writer.build(await turn.complete())

    async def count_tokens(self, raw: bytes) -> Payload:
        """Handle `POST /v1/messages/count_tokens`: count the tokens of the rendered prompt."""
        request = parse_request(CountTokensRequest, raw)
        return {"input_tokens": self._frontend.count_tokens(convert_request(request))}


@dataclass(kw_only=True)
class MessageWriter(PartsWriter):
    """Writer of a response as a message of the Messages API."""

    model: str
    hides_thoughts: bool
    context_length: int
    id: str = field(default_factory=lambda: generate_id("msg"), init=False)
    _index: int = field(default=-1, init=False)
    """Index of the content block that is open or was closed last."""

    def begin(self) -> list[Payload]:
        message = self._build_message([], None) | {"usage": self._build_usage(0)}
        return [{"type": "message_start", "message": message}]

    def open_block(self, kind: BlockKind) -> list[Payload]:
        empty = {"thinking": "", "signature": ""} if kind == "thought" else {"text": ""}
        return self._start({"type": "thinking" if kind == "thought" else "text"} | empty)

    def delta(self, kind: BlockKind, text: str) -> list[Payload]:
        if kind == "text":
            return [self._build_delta({"type": "text_delta", "text": text})]
        return [] if self.hides_thoughts else [self._build_delta({"type": "thinking_delta", "thinking": text})]

    def close_block(self, kind: BlockKind, text: str, is_cut: bool) -> list[Payload]:
        signature = {"type": "signature_delta", "signature": compute_signature(text, self.hides_thoughts)}
        return [*([self._build_delta(signature)] if kind == "thought" else []), self._stop()]

    def call(self, call: ToolCall) -> list[Payload]:
        events = self._start(_build_tool_use(call) | {"input": {}})
        pieces = ("", format_arguments(call))
        events += [self._build_delta({"type": "input_json_delta", "partial_json": piece}) for piece in pieces]
        return [*events, self._stop()]

    def end(self, parts: ResponseParts) -> list[Payload]:
        delta = {"stop_reason": self._stop_reason(parts), "stop_sequence": parts.stop_text}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._build_usage(parts.num_tokens, parts)},
            {"type": "message_stop"},
        ]

    def fail(self, error: ApiError) -> list[Payload]:
        return [build_error_body(error, self.id.replace("msg", "req"))]

    def build(self, parts: ResponseParts) -> Payload:
        content: list[Payload] = []
        for kind, text, _ in parts.iter_blocks():
            if kind == "text":
                content.append({"type": "text", "text": text, "citations": None})
            else:
                shown = "" if self.hides_thoughts else text
                signature = compute_signature(text, self.hides_thoughts)
                content.append({"type": "thinking", "thinking": shown, "signature": signature})
        content += [_build_tool_use(call) for call in parts.calls]
        message = self._build_message(content, self._stop_reason(parts), parts.stop_text)
        return message | {"usage": self._build_usage(parts.num_tokens, parts)}

    def _build_message(self, content: list[Payload], stop_reason: str | None, stop_text: str | None = None) -> Payload:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_text,
        }

    def _stop_reason(self, parts: ResponseParts) -> str:
        if parts.stop_text is not None and not parts.calls:
            return "stop_sequence"
        is_full = self.num_prompt_tokens + parts.num_tokens >= self.context_length
        if parts.finish_reason == "length" and is_full:
            return "model_context_window_exceeded"
        return _STOP_REASONS[parts.finish_reason or "stop"]

    def _build_usage(self, num_tokens: int, parts: ResponseParts | None = None) -> Payload:
        usage = {
            "input_tokens": self.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_tokens,
        }
        if parts is None or not parts.num_thought_tokens:
            return usage
        return usage | {"output_tokens_details": {"thinking_tokens": parts.num_thought_tokens}}

    def _start(self, block: Payload) -> list[Payload]:
        self._index += 1
        started: Payload = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [started, {"type": "ping"}] if self._index == 0 else [started]

    def _build_delta(self, delta: Payload) -> Payload:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Payload:
        return {"type": "content_block_stop", "index": self._index}


def _build_tool_use(call: ToolCall) -> Payload:
    return {"type": "tool_use", "id": generate_id("toolu"), "name": call.name, "input": call.arguments}
