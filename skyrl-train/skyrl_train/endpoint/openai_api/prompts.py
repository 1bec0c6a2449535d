"""Prompts: messages to the tokens that a model continues. Knows no engine and no HTTP.

What a model wrote in an earlier turn of a session is not encoded again: where the chat template shows that answer as it
was written, its tokens stand in the prompt as they were drawn.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from skyrl_gym.chat.template import ChatTemplate, ChatTemplateError
from skyrl_train.endpoint.errors import refused
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
    """Chat template whose failures are errors of the request.

    Args:
        kwargs: variables of the template besides messages; a request's own take precedence.
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
            ApiError: there is no template, or it cannot render these messages.
        """
        if self.chat_template is None and not self.tokenizer.chat_template:
            raise refused("the model has no chat template; use /v1/completions", "messages")
        reserved = {"messages", "tools", "tokenize", "return_dict", "chat_template", "conversation"}
        reserved |= {"add_generation_prompt", "continue_final_message"}
        if wrong := sorted(reserved & set(options.kwargs)):
            raise refused(f"chat_template_kwargs may not hold {', '.join(wrong)}", "chat_template_kwargs")
        kwargs = options.kwargs | {"continue_final_message": options.continue_final_message}
        try:
            return self.text(messages, options.add_generation_prompt, tools=options.tools, **kwargs)
        except ChatTemplateError as error:
            raise refused(str(error), "messages") from error

    def kwargs_of_effort(self, effort: str | None) -> dict[str, object]:
        """Return the variables of the template that `reasoning_effort` sets: those of this name, or whether the model
        thinks at all.

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
            return {}  # no thought to turn off
        raise refused(
            f"reasoning_effort={effort!r}: the model's chat template reads neither reasoning_effort nor "
            "enable_thinking; leave it out, or give chat_template_kwargs what the template reads",
            "reasoning_effort",
            "unsupported_value",
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids) | self.turn_ends.ids

    def text_of(self, token: int, skip_special_tokens: bool = False) -> str:
        """The text of one token. Remembered: a vocabulary is small, and answers ask for each of their tokens."""
        key = (token, skip_special_tokens)
        if key not in self._texts:
            self._texts[key] = self.decode([token], skip_special_tokens)
        return self._texts[key]


@dataclass(frozen=True)
class Said:
    """An assistant message as it was returned. Two are equal if they say the same: white space aside, and the tag that
    opens a thought, which stands in some templates' prompts and in others' answers."""

    content: str = field(compare=False)
    key: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments of each call."""

    @classmethod
    def of(cls, message: MessageType) -> "Said":
        """Return what a message for templates says (see `messages_for_template`)."""
        content = str(message.get("content") or "").strip()
        calls = (call["function"] for call in message.get("tool_calls") or [])
        return cls(
            content,
            _squeezed(content).removeprefix(THOUGHT_OPEN),
            tuple((call["name"], repr(call["arguments"])) for call in calls),
        )


@dataclass(frozen=True)
class _Reply:
    """An answer as its client was given it, its tokens, and their text with special tokens."""

    said: Said
    ids: np.ndarray
    text: str


@dataclass(frozen=True)
class _Exchange:
    """A prompt as text and tokens, and what was answered."""

    num_messages: int
    prompt_text: str
    prompt_ids: np.ndarray
    answers: list[_Reply]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(answer.ids) for answer in self.answers)

    def ids_before(self, answer: _Reply, rest: Sequence[int]) -> list[int]:
        """Return the ids of the prompt, the answer, and what follows."""
        return [*self.prompt_ids.tolist(), *answer.ids.tolist(), *rest]


class ConversationMemory:
    """The last exchanges of each session, so that a conversation goes on from the very tokens it was made of.

    Args:
        max_tokens: of all sessions together; the sessions that were silent longest are forgotten first. A forgotten
            conversation is rendered from its messages.
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
        answers: Sequence[tuple[Said, Sequence[int]]],
    ) -> None:
        """Take the prompt made of `num_messages` messages, and the answers to it with their tokens."""
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

    def may_know(self, session: str | int, messages: ConversationType) -> bool:
        """Check that these messages follow a completion of this session."""
        return any(
            exchange.num_messages < len(messages) and messages[exchange.num_messages]["role"] == "assistant"
            for exchange in self._sessions.get(session, [])
        )

    def find_prompt(
        self, session: str | int, messages: ConversationType, text: str, options: ChatOptions
    ) -> list[int] | None:
        """Return the ids of a conversation, with earlier completions as they were drawn; None if that is not possible.

        Args:
            text: the messages as the template renders them. The longest earlier prompt that it begins with is taken,
                if what follows there is an answer of ours: it says the same (white space aside) as what was written.
        """
        exchanges = self._sessions.get(session, [])
        for exchange in sorted(exchanges, key=lambda exchange: -exchange.num_messages):
            answered = exchange.num_messages
            if answered >= len(messages) or messages[answered]["role"] != "assistant":
                continue
            if not text.startswith(exchange.prompt_text):
                continue
            said = Said.of(messages[answered])
            for answer in reversed(exchange.answers):
                if (rest := self._rest_as_drawn(answer, said, text, len(exchange.prompt_text))) is not None:
                    return exchange.ids_before(answer, rest)
            written = [answer for answer in exchange.answers if answer.said == said]
            tail = self._tail(messages, answered, text, options) if written else None
            if tail is None:
                continue
            shown = text[len(exchange.prompt_text) : len(text) - len(tail)]
            for answer in reversed(written):
                if (rest := self._rest(answer.ids.tolist(), said, shown, tail)) is not None:
                    return exchange.ids_before(answer, rest)
        return None

    def _rest_as_drawn(self, answer: _Reply, said: Said, text: str, start: int) -> list[int] | None:
        """Return the ids of the text behind an answer that stands at `start` as it was drawn, character by character;
        None if it does not. An answer that no special token ends must be the whole of the message, too."""
        ends_itself = self._is_closed(answer.ids)
        if not text.startswith(answer.text, start) or not (ends_itself or answer.said == said):
            return None
        tail = text[start + len(answer.text) :]
        last = self._template.decode(answer.ids[-1:].tolist(), skip_special_tokens=False) if ends_itself else _MARK
        return self._template.encode_after(last, tail)

    def _is_closed(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Check whether a special token ends an answer; an empty one (of an engine that leaves out the token that
        ended it) is closed by the template."""
        return len(ids) > 0 and int(ids[-1]) in self._template.special_ids

    def _tail(self, messages: ConversationType, answered: int, text: str, options: ChatOptions) -> str | None:
        """Return the template's text after a completion: that after a mark in its place."""
        marked = [*messages[:answered], {"role": "assistant", "content": _MARK}, *messages[answered + 1 :]]
        try:
            rendered = self._template.render(marked, options)
        except Exception:  # a template that has no word for a result without a call, in whatever way it says so
            return None
        place = rendered.rfind(_MARK)
        tail = rendered[place + len(_MARK) :]
        return tail if place >= 0 and text.endswith(tail) else None

    def _rest(self, ids: list[int], said: Said, shown: str, tail: str) -> list[int] | None:
        """The ids of `tail` behind an answer; None if the template does not show the answer as it was written."""
        is_closed = self._is_closed(ids)
        text = ids[:-1] if is_closed else ids
        forms = [self._template.decode(text), self._template.decode(text, skip_special_tokens=False)]
        if not said.calls:
            forms += [said.content, said.key]  # without the stop text that ended it
        if _squeezed(shown) not in map(_squeezed, forms):
            return None
        last = self._template.decode(ids[-1:], skip_special_tokens=False)
        if is_closed:
            cut = (
                len(last) if tail.startswith(last) else self._template.turn_ends.count_leading_characters(tail, ids[-1])
            )
            return self._template.encode_after(last, tail[cut:])
        return self._template.encode_after(_MARK, tail)


def _squeezed(text: str) -> str:
    return "".join(text.split())
