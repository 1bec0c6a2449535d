"""Responses to chat requests of other protocols, in parts (thought, text, tool calls), complete or as stream events.

Each protocol has its own writer; prompts, tokens and recording are shared with `POST /v1/chat/completions`.
"""

import contextlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.errors import ApiError, build_internal_error
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice
from skyrl_train.endpoint.openai_api.payloads import Payload
from skyrl_train.endpoint.openai_api.replies import ChatReply
from skyrl_train.endpoint.openai_api.schema import ChatRequest
from skyrl_train.endpoint.openai_api.sessions import SessionRequest
from skyrl_train.endpoint.openai_api.thoughts import Thinking, is_inside_thought, split_thought

BlockKind = Literal["thought", "text"]

_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opening thought tag."""


@dataclass(frozen=True, kw_only=True)
class ResponseParts:
    """Parts of a response so far; complete once it has a finish reason."""

    thinking: Thinking
    calls: tuple[ToolCall, ...]
    finish_reason: str | None
    """`stop`, `length` or `tool_calls`; None while it is generated."""
    stop_text: str | None
    """The request's stop text that ended the response."""
    num_tokens: int
    num_thought_tokens: int

    def iter_blocks(self) -> Iterator[tuple[BlockKind, str, bool]]:
        """Yield kind, text so far and completeness of the thought and of the text, if present."""
        thought, text, is_closed = self.thinking
        is_complete = self.finish_reason is not None
        if thought is not None:
            yield "thought", thought, is_closed or is_complete
        if text:
            yield "text", text, is_complete

    def is_truncated_in(self, kind: BlockKind) -> bool:
        """Return whether the token limit truncated this block."""
        return self.finish_reason == "length" and kind == ("text" if self.thinking.text else "thought")


class ChatTurn:
    """Chat request with its prompt and single response."""

    def __init__(self, frontend: OpenAIFrontend, asked: SessionRequest, reply: ChatReply):
        self._frontend = frontend
        self._asked = asked
        self._reply = reply
        self._prompt = reply.prompts[0]
        self._is_open = is_inside_thought(reply.template.decode(self._prompt.ids[-_TAIL:], skip_special_tokens=False))

    @classmethod
    async def prepare(
        cls, frontend: OpenAIFrontend, request: ChatRequest, raw: bytes, session: str | None
    ) -> "ChatTurn":
        """Build the prompt. Raises ApiError."""
        return cls(frontend, *await frontend.open_chat(request, raw, session))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    async def complete(self) -> ResponseParts:
        """Generate the response. Raises ApiError."""
        async with contextlib.aclosing(self._frontend.growing(self._asked, self._reply)) as answers:
            return self._build_parts([answer async for answer in answers][-1])

    async def stream_events(self, writer: "PartsWriter") -> AsyncIterator[str]:
        """Generate the response as a stream of events. An error before the first event is raised, so that it can set
        the HTTP status; a later one becomes an event.
        """
        sent: dict[BlockKind, str] = {}
        closed: set[BlockKind] = set()
        try:
            async with contextlib.aclosing(self._frontend.growing(self._asked, self._reply)) as answers:
                async for answer in answers:
                    parts = self._build_parts(answer)
                    payloads = [] if writer.has_begun else writer.begin()
                    writer.has_begun = True
                    for kind, text, is_complete in parts.iter_blocks():
                        payloads += _iter_new_events(writer, kind, text, sent)
                        if is_complete and kind not in closed:
                            closed.add(kind)
                            payloads += writer.close_block(kind, text, parts.is_truncated_in(kind))
                    if parts.finish_reason is not None:
                        payloads += [event for call in parts.calls for event in writer.call(call)]
                        payloads += writer.end(parts)
                    for payload in payloads:
                        yield format_named_event(payload)
        except Exception as error:  # any error must be reported to the client
            if not writer.has_begun:
                raise
            for payload in writer.fail(build_internal_error(error)):
                yield format_named_event(payload)

    def _build_parts(self, answer: GeneratedChoice) -> ResponseParts:
        written = self._reply.read(answer)
        is_complete = answer.stop_reason is not None
        thinking = split_thought(written.content, self._is_open, is_complete)
        num_thought_tokens = (
            len(self._reply.template.encode(thinking.thought)) if is_complete and thinking.thought else 0
        )
        return ResponseParts(
            thinking=thinking,
            calls=written.calls,
            finish_reason=written.finish_reason,
            stop_text=self._reply.stop_text(answer)[1],
            num_tokens=len(answer.token_ids),
            num_thought_tokens=num_thought_tokens,
        )


@dataclass(kw_only=True)
class PartsWriter(ABC):
    """Writer of a response in one protocol. `begin`, `open_block`, `delta`, `close_block`, `call` and `end` return
    stream events, in this order; `whole` returns the object without a stream.
    """

    num_prompt_tokens: int
    has_begun: bool = field(default=False, init=False)

    @abstractmethod
    def begin(self) -> list[Payload]: ...
    @abstractmethod
    def open_block(self, kind: BlockKind) -> list[Payload]: ...
    @abstractmethod
    def delta(self, kind: BlockKind, text: str) -> list[Payload]: ...
    @abstractmethod
    def close_block(self, kind: BlockKind, text: str, is_cut: bool) -> list[Payload]: ...
    @abstractmethod
    def call(self, call: ToolCall) -> list[Payload]: ...
    @abstractmethod
    def end(self, parts: ResponseParts) -> list[Payload]: ...
    @abstractmethod
    def fail(self, error: ApiError) -> list[Payload]: ...
    @abstractmethod
    def build(self, parts: ResponseParts) -> Payload: ...


def _iter_new_events(writer: PartsWriter, kind: BlockKind, text: str, sent: dict[BlockKind, str]) -> list[Payload]:
    """Yield the events of new text in a block, and record it in `sent`."""
    events = [] if kind in sent else writer.open_block(kind)
    new = text[len(sent.get(kind, "")) :]
    sent[kind] = text
    return events + (writer.delta(kind, new) if new else [])


def format_arguments(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


def generate_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def format_named_event(payload: Payload) -> str:
    """Format a server-sent event named by its type."""
    return f"event: {payload['type']}\ndata: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"
