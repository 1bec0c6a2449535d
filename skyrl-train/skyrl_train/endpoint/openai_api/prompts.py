"""Conversion of messages to prompt tokens. Independent of engines and HTTP.

Completions of earlier turns of a session are not tokenized again: where the chat template renders a completion
unchanged, the prompt reuses the sampled tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_train.endpoint.errors import build_refusal
from skyrl_train.endpoint.openai_api.thoughts import THOUGHT_CLOSE, THOUGHT_OPEN
from skyrl_train.types import ConversationType, JsonObject, MessageType

_MARK = "skyrl-mark-of-an-answer"
_MOST_EXCHANGES = 32


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a request for the chat template."""

    tools: list[JsonObject] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, object] = field(default_factory=dict)


class EndpointTemplate(ChatTemplate):
    """Chat template that raises ApiError when it fails.

    Args:
        kwargs: template variables besides the messages; a request's variables take precedence.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        kwargs: JsonObject | None = None,
    ):
        super().__init__(tokenizer, chat_template, kwargs)
        self._texts: dict[tuple[int, bool], str] = {}

    def render(self, messages: ConversationType, options: ChatOptions) -> str:
        """Render a conversation.

        Raises:
            ApiError: no template, or it cannot render these messages.
        """
        if self.chat_template is None and not self.tokenizer.chat_template:
            raise build_refusal("the model has no chat template; use /v1/completions", "messages")
        reserved = {"messages", "tools", "tokenize", "return_dict", "chat_template", "conversation"}
        reserved |= {"add_generation_prompt", "continue_final_message"}
        if wrong := sorted(reserved & set(options.kwargs)):
            raise build_refusal(f"chat_template_kwargs must not contain {', '.join(wrong)}", "chat_template_kwargs")
        kwargs = options.kwargs | {"continue_final_message": options.continue_final_message}
        try:
            return self.text(messages, options.add_generation_prompt, tools=options.tools, **kwargs)
        except ChatTemplateError as error:
            raise build_refusal(str(error), "messages") from error

    def get_effort_kwargs(self, effort: str | None) -> dict[str, object]:
        """Return the template variables set by `reasoning_effort`: the variable of this name, or the switch that
        enables thinking.

        Raises:
            ApiError: the template reads neither.
        """
        source = self.source or ""
        if effort is None:
            return {}
        if "reasoning_effort" in source:
            return {"reasoning_effort": effort}
        if "enable_thinking" in source:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and THOUGHT_CLOSE not in source:
            return {}  # no thought to disable
        raise build_refusal(
            f"reasoning_effort={effort!r}: the model's chat template uses neither reasoning_effort nor "
            "enable_thinking; remove it, or set chat_template_kwargs that the template uses",
            "reasoning_effort",
            "unsupported_value",
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids) | self.turn_ends.ids

    def decode_token(self, token: int, skip_special_tokens: bool = False) -> str:
        """Return the text of one token. Cached, since responses decode each of their tokens."""
        key = (token, skip_special_tokens)
        if key not in self._texts:
            self._texts[key] = self.decode([token], skip_special_tokens)
        return self._texts[key]


@dataclass(frozen=True)
class ReturnedMessage:
    """Assistant message as returned to the client. Equality ignores white space and the opening thought tag, which
    belongs to the prompt in some templates and to the completion in others.
    """

    content: str = field(compare=False)
    key: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each call."""

    @classmethod
    def of(cls, message: MessageType) -> "ReturnedMessage":
        """Extract the content of a message for templates (see `convert_messages_for_template`)."""
        content = str(message.get("content") or "").strip()
        calls = (call["function"] for call in message.get("tool_calls") or [])
        return cls(
            content,
            _strip_whitespace(content).removeprefix(THOUGHT_OPEN),
            tuple((call["name"], repr(call["arguments"])) for call in calls),
        )


@dataclass(frozen=True)
class _Reply:
    """Response as returned to the client, its tokens, and their text with special tokens."""

    said: ReturnedMessage
    ids: np.ndarray
    text: str


@dataclass(frozen=True)
class _Exchange:
    """Prompt as text and tokens, and its responses."""

    num_messages: int
    prompt_text: str
    prompt_ids: np.ndarray
    answers: list[_Reply]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(answer.ids) for answer in self.answers)

    def build_ids(self, answer: _Reply, rest: Sequence[int]) -> list[int]:
        """Return the ids of prompt, completion and following text."""
        return [*self.prompt_ids.tolist(), *answer.ids.tolist(), *rest]


class ConversationMemory:
    """Memory of the last exchanges of each session, so that a conversation continues from its sampled tokens.

    Args:
        max_tokens: limit over all sessions; the least recently used sessions are evicted. An evicted conversation is
            rendered from its messages.
    """

    def __init__(self, template: EndpointTemplate, max_tokens: int = 32_000_000):
        self._template = template
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._sessions: OrderedDict[str | int, list[_Exchange]] = OrderedDict()

    def remember(
        self,
        session: str | int,
        num_messages: int,
        prompt_text: str,
        prompt_ids: Sequence[int],
        answers: Sequence[tuple[ReturnedMessage, Sequence[int]]],
    ) -> None:
        """Store a prompt of `num_messages` messages and its responses with their tokens."""
        exchange = _Exchange(
            num_messages,
            prompt_text,
            np.asarray(prompt_ids, dtype=np.int32),
            [
                _Reply(said, np.asarray(ids, dtype=np.int32), self._template.decode(ids, skip_special_tokens=False))
                for said, ids in answers
            ],
        )
        exchanges = self._sessions.setdefault(session, [])
        exchanges.append(exchange)
        self._num_tokens += exchange.num_tokens
        self._sessions.move_to_end(session)
        if len(exchanges) > _MOST_EXCHANGES:
            self._num_tokens -= exchanges.pop(0).num_tokens
        while self._num_tokens > self._max_tokens and len(self._sessions) > 1:
            _, forgotten = self._sessions.popitem(last=False)
            self._num_tokens -= sum(exchange.num_tokens for exchange in forgotten)

    def has_candidate(self, session: str | int, messages: ConversationType) -> bool:
        """Return whether these messages may follow a stored response of this session."""
        return any(
            exchange.num_messages < len(messages) and messages[exchange.num_messages]["role"] == "assistant"
            for exchange in self._sessions.get(session, [])
        )

    def find_prompt(
        self, session: str | int, messages: ConversationType, text: str, options: ChatOptions
    ) -> list[int] | None:
        """Return the ids of a conversation, with earlier completions as sampled; None if that is not possible.

        Args:
            text: the messages as the template renders them. Uses the longest earlier prompt that is a prefix and is
                followed by a stored response with equal content (ignoring white space).
        """
        exchanges = self._sessions.get(session, [])
        for exchange in sorted(exchanges, key=lambda exchange: -exchange.num_messages):
            answered = exchange.num_messages
            if answered >= len(messages) or messages[answered]["role"] != "assistant":
                continue
            if not text.startswith(exchange.prompt_text):
                continue
            said = ReturnedMessage.of(messages[answered])
            for answer in reversed(exchange.answers):
                if (rest := self._find_rest_as_sampled(answer, said, text, len(exchange.prompt_text))) is not None:
                    return exchange.build_ids(answer, rest)
            written = [answer for answer in exchange.answers if answer.said == said]
            tail = self._render_tail(messages, answered, text, options) if written else None
            if tail is None:
                continue
            shown = text[len(exchange.prompt_text) : len(text) - len(tail)]
            for answer in reversed(written):
                if (rest := self._encode_rest(answer.ids.tolist(), said, shown, tail)) is not None:
                    return exchange.build_ids(answer, rest)
        return None

    def _find_rest_as_sampled(self, answer: _Reply, said: ReturnedMessage, text: str, start: int) -> list[int] | None:
        """Return the ids of the text after a completion that occurs verbatim at `start`; None if it does not. A
        completion without a closing special token must also be the entire message.
        """
        ends_itself = self._is_closed(answer.ids)
        if not text.startswith(answer.text, start) or not (ends_itself or answer.said == said):
            return None
        tail = text[start + len(answer.text) :]
        last = self._template.decode(answer.ids[-1:].tolist(), skip_special_tokens=False) if ends_itself else _MARK
        return self._template.encode_after(last, tail)

    def _is_closed(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Return whether a special token ends a completion; the template closes an empty one (from an engine that omits
        the end token).
        """
        return len(ids) > 0 and int(ids[-1]) in self._template.special_ids

    def _render_tail(self, messages: ConversationType, answered: int, text: str, options: ChatOptions) -> str | None:
        """Render the template's text after a completion, found with a marker as the completion."""
        marked = [*messages[:answered], {"role": "assistant", "content": _MARK}, *messages[answered + 1 :]]
        try:
            rendered = self._template.render(marked, options)
        except Exception:  # a template that cannot render a result without a call may raise any error
            return None
        place = rendered.rfind(_MARK)
        tail = rendered[place + len(_MARK) :]
        return tail if place >= 0 and text.endswith(tail) else None

    def _encode_rest(self, ids: list[int], said: ReturnedMessage, shown: str, tail: str) -> list[int] | None:
        """Return the ids of `tail` after a completion; None if the template does not render the completion verbatim."""
        is_closed = self._is_closed(ids)
        text = ids[:-1] if is_closed else ids
        forms = [self._template.decode(text), self._template.decode(text, skip_special_tokens=False)]
        if not said.calls:
            forms += [said.content, said.key]  # without the stop text that ended it
        if _strip_whitespace(shown) not in map(_strip_whitespace, forms):
            return None
        last = self._template.decode(ids[-1:], skip_special_tokens=False)
        if is_closed:
            cut = (
                len(last) if tail.startswith(last) else self._template.turn_ends.count_leading_characters(tail, ids[-1])
            )
            return self._template.encode_after(last, tail[cut:])
        return self._template.encode_after(_MARK, tail)


def _strip_whitespace(text: str) -> str:
    return "".join(text.split())
