"""Answers to chat requests that came by another protocol: in parts (thought, text, tool calls), whole or as events.

Each protocol has a writer of its own; prompts, tokens and the recorder are those of `POST /v1/chat/completions`.
"""

import contextlib
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from skyrl_gym.chat.tool_calls import ToolCall
from skyrl_train.endpoint.errors import ApiError, error_of_ours
from skyrl_train.endpoint.openai_api.frontend import OpenAIFrontend
from skyrl_train.endpoint.openai_api.generation import GeneratedChoice
from skyrl_train.endpoint.openai_api.payloads import Payload
from skyrl_train.endpoint.openai_api.replies import ChatReply
from skyrl_train.endpoint.openai_api.schema import ChatRequest
from skyrl_train.endpoint.openai_api.sessions import Asked
from skyrl_train.endpoint.openai_api.thoughts import Thinking, opens_thought, split_thought

BlockKind = Literal["thought", "text"]

_TAIL = 16
"""Tokens at a prompt's end among which the tag stands that opens a thought."""


@dataclass(frozen=True, kw_only=True)
class AnswerParts:
    """Parts of an answer so far; complete once it has a finish reason."""

    thinking: Thinking
    calls: tuple[ToolCall, ...]
    finish_reason: str | None
    """`stop`, `length` or `tool_calls`; None while the answer grows."""
    stop_text: str | None
    """The stop text of the request that ended the answer."""
    num_tokens: int
    num_thought_tokens: int

    def blocks(self) -> Iterator[tuple[BlockKind, str, bool]]:
        """Yield kind, text so far and completeness of the thought and the text, if the answer has them."""
        thought, text, is_closed = self.thinking
        is_complete = self.finish_reason is not None
        if thought is not None:
            yield "thought", thought, is_closed or is_complete
        if text:
            yield "text", text, is_complete

    def cuts(self, kind: BlockKind) -> bool:
        """Test whether the limit of tokens ended the answer within this block."""
        return self.finish_reason == "length" and kind == ("text" if self.thinking.text else "thought")


class ChatTurn:
    """Chat request with its prompt, and the one answer to it."""

    def __init__(self, frontend: OpenAIFrontend, asked: Asked, reply: ChatReply):
        self._frontend = frontend
        self._asked = asked
        self._reply = reply
        self._prompt = reply.prompts[0]
        self._is_open = opens_thought(reply.template.decode(self._prompt.ids[-_TAIL:], skip_special_tokens=False))

    @classmethod
    async def opened(
        cls, frontend: OpenAIFrontend, request: ChatRequest, raw: bytes, session: str | None
    ) -> "ChatTurn":
        """Make the prompt. Raises ApiError."""
        return cls(frontend, *await frontend.open_chat(request, raw, session))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    async def complete(self) -> AnswerParts:
        """Generate the answer. Raises ApiError."""
        async with contextlib.aclosing(self._frontend.growing(self._asked, self._reply)) as answers:
            return self._parts([answer async for answer in answers][-1])

    async def events(self, writer: "AnswerWriter") -> AsyncIterator[str]:
        """Generate the answer, and write it as it grows. An error before the first event is raised, so that it can have
        a status; a later one is an event."""
        sent: dict[BlockKind, str] = {}
        closed: set[BlockKind] = set()
        try:
            async with contextlib.aclosing(self._frontend.growing(self._asked, self._reply)) as answers:
                async for answer in answers:
                    parts = self._parts(answer)
                    payloads = [] if writer.has_begun else writer.begin()
                    writer.has_begun = True
                    for kind, text, is_complete in parts.blocks():
                        payloads += _new_in(writer, kind, text, sent)
                        if is_complete and kind not in closed:
                            closed.add(kind)
                            payloads += writer.close_block(kind, text, parts.cuts(kind))
                    if parts.finish_reason is not None:
                        payloads += [event for call in parts.calls for event in writer.call(call)]
                        payloads += writer.end(parts)
                    for payload in payloads:
                        yield named_event(payload)
        except Exception as error:  # whatever it is, the client must hear of it
            if not writer.has_begun:
                raise
            for payload in writer.fail(error_of_ours(error)):
                yield named_event(payload)

    def _parts(self, answer: GeneratedChoice) -> AnswerParts:
        written = self._reply.read(answer)
        is_complete = answer.stop_reason is not None
        thinking = split_thought(written.content, self._is_open, is_complete)
        num_thought_tokens = (
            len(self._reply.template.encode(thinking.thought)) if is_complete and thinking.thought else 0
        )
        return AnswerParts(
            thinking=thinking,
            calls=written.calls,
            finish_reason=written.finish_reason,
            stop_text=self._reply.stop_text(answer)[1],
            num_tokens=len(answer.token_ids),
            num_thought_tokens=num_thought_tokens,
        )


@dataclass(kw_only=True)
class AnswerWriter(ABC):
    """Answer in the form of one protocol. `begin`, `open_block`, `delta`, `close_block`, `call` and `end` make the
    events of a stream, in this order; `whole` the object without a stream."""

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
    def end(self, parts: AnswerParts) -> list[Payload]: ...
    @abstractmethod
    def fail(self, error: ApiError) -> list[Payload]: ...
    @abstractmethod
    def whole(self, parts: AnswerParts) -> Payload: ...


def _new_in(writer: AnswerWriter, kind: BlockKind, text: str, sent: dict[BlockKind, str]) -> list[Payload]:
    """Return the events of what is new in a block, and note it in `sent`."""
    events = [] if kind in sent else writer.open_block(kind)
    new = text[len(sent.get(kind, "")) :]
    sent[kind] = text
    return events + (writer.delta(kind, new) if new else [])


def arguments_of(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def named_event(payload: Payload) -> str:
    """One event of a stream whose events have names: their types."""
    return f"event: {payload['type']}\ndata: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"
