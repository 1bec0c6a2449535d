"""Conversation of an agent, token in, token out: generated tokens are never encoded again."""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from skyrl_agent.chat.encoding import MessageEncoder
from skyrl_agent.chat.transitions import (
    Observation,
    TokensWithLogprobs,
    Transition,
    transitions_to_training_data,
)
from skyrl_agent.errors import ConfigError
from skyrl_agent.types import Message, MetaInfo

logger = logging.getLogger(__name__)

_EXCERPT_CHARACTERS = 60


@dataclass(frozen=True)
class Break:
    """Point at which the chat template changed earlier text, so that a new training row begins."""

    message_index: int
    """Index of the changed message in `Conversation.messages`."""
    role: str
    why: str


@dataclass(frozen=True)
class _Prompt:
    """Next input of the model."""

    ids: list[int]
    text: str
    """Text of `ids` from the beginning of the last answer on; after a break, of all `ids`."""
    broken: Break | None = None


class Conversation:
    """Conversation that maps messages to ids: call `input_ids()`, `add_answer`, `add` with the results, and repeat.

    The ids of a turn are the ids of the previous turn, the generated ids, and the ids of the template's text up to the
    next header (the end of the turn if the response was truncated, and all messages since). If the template appends
    nothing but that, `transitions` merge into one training row. If it changes earlier text (drops a thought, moves the
    tools), that is a `Break`: the whole conversation is encoded again and a new row begins.

    Verification: the text between two responses is rendered in a conversation of one question (cost: the length of the
    step). The first time that a kind of step occurs with an encoder, and each time the number of messages has doubled,
    the whole conversation is rendered too and must equal the text so far plus the step, character by character. A kind
    is the `MessageEncoder.shape` of each message of the step and of the step before, and the sets of shapes before the
    last break and since. T turns therefore cost T steps and log(T) full renderings; a template that counts messages or
    compares them is noticed at the next doubling, not at once. Whitespace and the spelling of structured calls may
    differ between the generated and the rendered text: the generated tokens are kept.

    If a server reports no ids, its text is encoded without an end of turn and has no log-probs.

    Args:
        messages: messages before the first response.
        append_only: never render earlier messages again: the text after a response is rendered in a conversation of one
            question, and no breaks occur. Thoughts stay in the context, even if the template drops them.
    """

    def __init__(self, encoder: MessageEncoder, messages: Sequence[Message], append_only: bool = False) -> None:
        self.encoder, self.append_only = encoder, append_only
        self.transitions: list[Transition] = []
        self.breaks: list[Break] = []
        self.restart(messages)

    def restart(self, messages: Sequence[Message]) -> None:
        """Replace the messages. Transitions stay; the next one begins a new training row."""
        self.messages: list[Message] = list(messages)
        self._answers: list[int] = []
        """Indices of the answers since the last break."""
        self._texts: list[str] = []
        """Text before each of them, after the one before it."""
        self._written: list[int] = []
        """Ids up to and including the last answer."""
        self._before: frozenset[Hashable] = frozenset()
        """Shapes of the messages before the last break."""
        self._since: frozenset[Hashable] = frozenset()
        """Shapes of the messages since then, before the last answer."""
        self._verify_at = 0
        self._prompt: _Prompt | None = None
        self._prompt_length: int | None = None

    def add(self, *messages: Message) -> None:
        """Append messages after the last response."""
        if messages:
            self.messages += messages
            self._prompt = None

    def input_ids(self) -> list[int]:
        """Return the next input ids of the model, up to and including the header of its response.

        Raises:
            ConfigError: the template cannot render these messages.
        """
        return list(self._render_next().ids)

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the initial prompt, generated ones and others."""
        if self._prompt_length is None:
            return 0
        nothing_added = len(self.messages) == self._answers[-1] + 1
        return len(self._written if nothing_added else self._render_next().ids) - self._prompt_length

    def add_answer(self, text: str, meta: MetaInfo, message: Message | None = None) -> Transition:
        """Append the model's reply to `input_ids()`.

        Args:
            message: message for the template (`ToolFormat.answer_message`); None: the text unchanged.

        Raises:
            BackendError: the number of log-probs differs from the number of tokens.
        """
        prompt = self._render_next()
        written = TokensWithLogprobs.from_reply(text, meta)
        if written.token_ids is None:
            written = replace(written, token_ids=self.encoder.encode_continuation(text))
        metrics: dict[str, object] = {"finish_reason": meta.get("finish_reason")}
        self.transitions.append(Transition(Observation(prompt.ids), written, metrics=metrics))
        if prompt.broken:
            self.breaks.append(prompt.broken)
            self._answers, self._texts = [], []
        if self._answers:
            self._since |= {*self._collect_shapes(self._answers[-1])}
        else:
            self._before, self._since = frozenset(self._collect_shapes(0)), frozenset()
        if self._prompt_length is None:
            self._prompt_length = len(prompt.ids)
        self._answers.append(len(self.messages))
        self._texts.append(prompt.text)
        self._written = [*prompt.ids, *(written.token_ids or [])]
        self.messages.append(dict(message or {"role": "assistant", "content": text}))
        if isinstance(content := self.messages[-1].get("content"), str):
            self.messages[-1]["content"] = self.encoder.turn_ends.strip(content)
        self._prompt = None
        return self.transitions[-1]

    def _render_next(self) -> _Prompt:
        if self._prompt is None:
            self._prompt = self._render_continuation() if self._answers else self._render_all()
        return self._prompt

    def _collect_shapes(self, first: int) -> list[Hashable]:
        return [self.encoder.shape(message) for message in self.messages[first:]]

    def _render_all(self, broken: Break | None = None, text: str | None = None) -> _Prompt:
        if broken:
            added = tuple(message["role"] for message in self.messages[self._answers[-1] + 1 :])
            _log_warning(self.encoder.source or "", broken.role, added, broken)
        text = text or self.encoder.text(self.messages, add_generation_prompt=True)
        return _Prompt(self.encoder.encode(text), text, broken)

    def _render_continuation(self) -> _Prompt:
        index = self._answers[-1]
        answer, added = self.messages[index], self.messages[index + 1 :]
        if self.append_only:
            return self._render_appended(answer, added)
        kind = (self._before, self._since, *self._collect_shapes(self._answers[-2:][0]))
        step = self.encoder.step(answer, added)
        if step is None or kind not in self.encoder.trusted or len(self.messages) >= self._verify_at:
            before, whole = "".join(self._texts), self.encoder.text(self.messages, add_generation_prompt=True)
            if not whole.startswith(before):
                return self._render_all(self._find_rewritten_message(before, whole), whole)
            self._verify_at = 2 * len(self.messages)
            if whole[len(before) :] == step:
                self.encoder.trusted.add(kind)
            step = whole[len(before) :]
        try:
            end = self._count_generated_end(answer, step)
        except _ResponseMismatch as difference:
            return self._render_all(Break(index, "assistant", str(difference)))
        return _Prompt(self._written + self.encoder.encode_continuation(step[end:]), step)

    def _render_appended(self, answer: Message, added: Sequence[Message]) -> _Prompt:
        end, text = self.encoder.render_after_response(answer, added)
        ids = self.transitions[-1].ac.token_ids or []
        if not (ids and self.encoder.is_special(ids[-1])):  # truncated before the end of the turn
            text = end + text
        return _Prompt(self._written + self.encoder.encode_continuation(text), text)

    @property
    def token_factor(self) -> float:
        """Ratio of the tokens of all training rows to the tokens of one append-only row. An overestimate if the
        template dropped thoughts.
        """
        rows = [
            (len(row.input_tokens), len(row.response_tokens)) for row in transitions_to_training_data(self.transitions)
        ]
        appended, before = 0, 0
        for turn in self.transitions:
            num_read, num_written = len(turn.ob.input_ids), len(turn.ac.token_ids or [])
            appended += max(num_read - before, 0) + num_written
            before = num_read + num_written
        return sum(map(sum, rows)) / appended if appended else 1.0

    def _count_generated_end(self, answer: Message, step: str) -> int:
        """Return the number of characters of `step` that the model generated."""
        ids = self.transitions[-1].ac.token_ids or []
        written = self.encoder.decode(ids)
        if step.startswith(written):
            return len(written)
        body, end = self.encoder.split_at_end(
            step[: _count_common_prefix(step, self.encoder.render_last_response(answer) or "")]
        )
        wrote_end = bool(ids) and self.encoder.is_special(ids[-1])
        own = written.removesuffix(self.encoder.decode(ids[-1:])) if wrote_end else written
        if not end or not _is_equivalent(answer, own, body):
            raise _ResponseMismatch(
                f"the model generated {_format_excerpt(own)} and the template renders {_format_excerpt(body or step)}"
            )
        if wrote_end and self.encoder.decode(ids[-1:]) != end:
            raise _ResponseMismatch(f"the model ended it with {self.encoder.decode(ids[-1:])}, the template with {end}")
        return len(body) + (len(end) if wrote_end else 0)

    def _find_rewritten_message(self, before: str, whole: str) -> Break:
        """Find the message at which the template's text changed."""
        at = _count_common_prefix(before, whole)
        turn = bisect_right(list(accumulate(map(len, self._texts))), at)
        first = self._answers[turn - 1] if turn else 0

        def ends_beyond(index: int) -> bool:
            try:
                return self.encoder.text(self.messages[: index + 1]).startswith(before[: at + 1])
            except ConfigError:
                return False

        index = self._answers[turn]  # the response's header, unless an earlier message ends after it
        if ends_beyond(index - 1):
            index = bisect_left(range(index), True, lo=first, key=ends_beyond)
        at = max(at - 10, 0)
        was, became = _format_excerpt(before[at:]), _format_excerpt(whole[at:])
        why = f"{was} became {became} when message {len(self.messages) - 1} was added"
        return Break(index, str(self.messages[index].get("role")), why)


class _ResponseMismatch(Exception):
    """Difference between the rendered and the generated text of a response."""


def _is_equivalent(answer: Message, written: str, body: str) -> bool:
    """Compare the model's text with the template's, except for white space and the spelling of arguments of calls."""
    parts = [answer.get(field) or "" for field in ("content", "thinking", "reasoning_content")]
    names = [call["function"]["name"] for call in answer.get("tool_calls") or []]
    if not names and not any(parts[1:]):
        return _remove_space(written) == _remove_space(body)
    kept = all(_remove_space(part) in _remove_space(body) for part in parts)
    return kept and all(body.count(name) >= names.count(name) for name in names)


def _count_common_prefix(a: str, b: str) -> int:
    """Count the characters up to the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _remove_space(text: str) -> str:
    return "".join(text.split())


def _format_excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}...")


def _log_warning(template: str, role: str, added: tuple[str, ...], broken: Break) -> None:
    if (template, role, added) not in _warned:
        _warned.add((template, role, added))
        logger.warning(
            "the chat template does not only append: message %d (%s): %s. A new training row starts here and "
            "wherever this happens again (reported once). generator.append_only keeps all tokens that the model has "
            "seen and generated",
            broken.message_index,
            role,
            broken.why,
        )


_warned: set[tuple[str, str, tuple[str, ...]]] = set()
