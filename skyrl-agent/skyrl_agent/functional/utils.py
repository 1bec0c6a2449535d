"""Turns of a model as tokens, and the training rows they make. Knows no tokenizer and no agent."""

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.errors import BackendError
from skyrl_agent.finish import CONTEXT_WINDOW_EXCEEDED
from skyrl_agent.types import MetaInfo

__all__ = [
    "NOT_WRITTEN",
    "ContextWindowExceeded",
    "NoToolCall",
    "Observation",
    "ParseError",
    "StepException",
    "StepResult",
    "TokensWithLogprobs",
    "ToolExecutionFailed",
    "TrainingDatum",
    "Transition",
    "record_transition",
    "transitions_to_training_data",
]

NOT_WRITTEN = -1
"""Weight version of a token that the model did not write."""


@dataclass
class TokensWithLogprobs:
    """What the model wrote in one turn.

    Args:
        token_ids: [T]; None where nobody knows them.
        logprobs: [T]; None where the server told none (or not all).
        weight_versions: [T] of the model's weights; None where not told.
    """

    token_ids: list[int] | None
    logprobs: list[float] | None = None
    text: str | None = None
    weight_versions: list[int] | None = None

    @classmethod
    def of_answer(cls, text: str, meta: Mapping[str, Any]) -> "TokensWithLogprobs":
        """
        Raises:
            BackendError: the server told another number of log-probs or versions than of tokens.
        """
        ids = meta.get("output_tokens")
        return cls(
            token_ids=None if ids is None else list(ids),
            logprobs=_one_a_token("log-probs", meta.get("logprobs"), ids),
            text=text,
            weight_versions=_one_a_token("weight versions", meta.get("weight_versions"), ids),
        )


def _one_a_token(what: str, values: Sequence[Any] | None, ids: Sequence[int] | None) -> list[Any] | None:
    if values is None or ids is None or any(value is None for value in values):
        return None
    if len(values) != len(ids):
        raise BackendError(f"the model's server told {len(values)} {what} for {len(ids)} tokens; it must tell one each")
    return list(values)


@dataclass
class Observation:
    """What the model read, whole."""

    input_ids: list[int]


@dataclass
class Transition:
    """One turn: what the model read and what it wrote then. The reward of a trajectory is its result's, not here."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float = 0.0
    episode_done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainingDatum:
    """One row: a prompt of P tokens and a response of R tokens that begins with what the model wrote first.

    Args:
        input_tokens: [P] what the row's first turn read.
        response_tokens: [R]
        response_logprobs: [R], 0.0 where the mask is 0; None unless every written token has one.
        response_mask: [R], 1 on tokens that the model wrote.
        weight_versions: [R], -1 where the mask is 0; None unless every written token has one.
    """

    input_tokens: list[int]
    response_tokens: list[int]
    response_logprobs: list[float] | None
    response_mask: list[int]
    weight_versions: list[int] | None = None


def transitions_to_training_data(transitions: Sequence[Transition]) -> list[TrainingDatum]:
    """Merges turns into as few rows as token fidelity allows.

    A turn that read everything so far and more goes on with the row: what it read beyond has mask 0, what it wrote mask
    1. Any other begins a new row. A row in which the model wrote nothing is left out, as nothing of it could train.

    Raises:
        ValueError: ids of an answer are unknown, or its log-probs or versions are not one a token.
    """
    rows: list[TrainingDatum] = []
    stretch: list[Transition] = []
    sequence: list[int] = []
    for index, transition in enumerate(transitions):
        ids = _written(transition.ac, index)
        read = transition.ob.input_ids
        if stretch and read[: len(sequence)] != sequence:
            rows += _row(stretch)
            stretch = []
        stretch.append(transition)
        sequence = [*read, *ids]
    return rows + list(_row(stretch))


def _written(action: TokensWithLogprobs, index: int) -> list[int]:
    ids = action.token_ids
    if ids is None:
        raise ValueError(
            f"transition {index} has no token ids, so it cannot be trained on: encode its text "
            f"(functional.dialogue.Dialogue does), or ask a server that returns ids"
        )
    for what, values in (("logprobs", action.logprobs), ("weight_versions", action.weight_versions)):
        if values is not None and len(values) != len(ids):
            raise ValueError(
                f"transition {index} has {len(values)} {what} for {len(ids)} tokens; it must have one each"
            )
    return ids


def _row(stretch: list[Transition]) -> Iterator[TrainingDatum]:
    if not any(transition.ac.token_ids for transition in stretch):
        return
    actions = [transition.ac for transition in stretch if transition.ac.token_ids]
    prompt = stretch[0].ob.input_ids
    row = TrainingDatum(list(prompt), [], [], [])
    logprobs: list[float] = []
    versions: list[int] = []
    for transition in stretch:
        ids = transition.ac.token_ids or []
        given = transition.ob.input_ids[len(prompt) + len(row.response_tokens) :]
        row.response_tokens += [*given, *ids]
        row.response_mask += [0] * len(given) + [1] * len(ids)
        logprobs += [0.0] * len(given) + (transition.ac.logprobs or [])
        versions += [NOT_WRITTEN] * len(given) + (transition.ac.weight_versions or [])
    row.response_logprobs = None if any(action.logprobs is None for action in actions) else logprobs
    row.weight_versions = None if any(action.weight_versions is None for action in actions) else versions
    yield row


Generate = Callable[..., Awaitable[tuple[str, MetaInfo]]]


def record_transition(generate: Generate) -> Generate:
    """Decorates an async method that asks a model: (self, *, input_ids, ...) -> (text, meta). Each answer is added to
    `self.transitions`; if the method raises, nothing is.

    Raises:
        TypeError: `input_ids` was not given by keyword.
        BackendError: the answer's log-probs are not one a token.
    """

    @functools.wraps(generate)
    async def recorded(self: Any, *args: Any, **kwargs: Any) -> tuple[str, MetaInfo]:
        if "input_ids" not in kwargs:
            raise TypeError(f"{generate.__name__} must be called with the keyword input_ids: its tokens are recorded")
        read = list(kwargs["input_ids"])
        text, meta = await generate(self, *args, **kwargs)
        metrics = {"finish_reason": meta.get("finish_reason")}
        written = TokensWithLogprobs.of_answer(text, meta)
        self.transitions.append(Transition(Observation(read), written, metrics=metrics))
        return text, meta

    return recorded


@dataclass(frozen=True)
class StepResult:
    """What a step of an agent came to."""

    done: bool
    finish_reason: str | None = None
    result: Any = None

    @classmethod
    def continuing(cls, result: Any = None) -> "StepResult":
        return cls(False, None, result)

    @classmethod
    def finished(cls, reason: str, result: Any = None) -> "StepResult":
        return cls(True, reason, result)

    def to_tuple(self) -> tuple[bool, str | None, Any]:
        return self.done, self.finish_reason, self.result


class StepException(Exception):
    """Ends a step early with `step_result`."""

    def __init__(self, step_result: StepResult) -> None:
        super().__init__(step_result.finish_reason or "the step is over, the agent goes on")
        self.step_result = step_result


class ContextWindowExceeded(StepException):
    """The budget of tokens is used up: the agent is done."""

    def __init__(self, result: Any = None) -> None:
        super().__init__(StepResult.finished(CONTEXT_WINDOW_EXCEEDED, result))


class _Continue(StepException):
    def __init__(self, result: Any = None) -> None:
        super().__init__(StepResult.continuing(result))


class ParseError(_Continue):
    """The answer has a call that is malformed; the model was told."""


class NoToolCall(_Continue):
    """The answer has no call; the model was told."""


class ToolExecutionFailed(_Continue):
    """A call failed; the model was told."""
