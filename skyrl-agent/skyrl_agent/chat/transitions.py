"""Turns of a model as tokens, and the training rows they make. Independent of tokenizers and agents."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from skyrl_agent.errors import BackendError
from skyrl_agent.types import MetaInfo
from skyrl_gym.chat.turns import TurnTokens, get_tokens_between, join_column, join_optional_column, split_appending

T = TypeVar("T")

NO_VERSION = -1
"""Weight version of a token that the model did not generate."""


@dataclass
class TokensWithLogprobs:
    """Tokens that the model generated in one turn.

    Args:
        token_ids: [T]; None if unknown.
        logprobs: [T]; None unless the server reports one for each token.
        weight_versions: [T]; None unless the server reports one for each token.
    """

    token_ids: list[int] | None
    logprobs: list[float] | None = None
    text: str | None = None
    weight_versions: list[int] | None = None

    @classmethod
    def from_reply(cls, text: str, meta: MetaInfo) -> "TokensWithLogprobs":
        """Read a server's reply.

        Raises:
            BackendError: the number of log-probs or weight versions differs from the number of tokens.
        """
        ids = meta["output_tokens"]
        return cls(
            token_ids=None if ids is None else list(ids),
            logprobs=_check_length("log-probs", meta.get("logprobs"), ids),
            text=text,
            weight_versions=_check_length("weight versions", meta.get("weight_versions"), ids),
        )


def _check_length(what: str, values: Sequence[T] | None, ids: Sequence[int] | None) -> list[T] | None:
    if values is None or ids is None or any(value is None for value in values):
        return None
    if len(values) != len(ids):
        raise BackendError(f"the model's server reported {len(values)} {what} for {len(ids)} tokens; expected one each")
    return list(values)


@dataclass
class Observation:
    """Whole input of the model in one turn."""

    input_ids: list[int]


@dataclass
class Transition:
    """One turn: the model's input and output. The reward of a trajectory belongs to its result."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float = 0.0
    episode_done: bool = False
    metrics: dict[str, object] = field(default_factory=dict)


@dataclass
class TrainingDatum:
    """One training row: a prompt of P tokens and a response of R tokens that begins with the first generated token.

    Args:
        input_tokens: [P] input of the row's first turn.
        response_tokens: [R]
        response_logprobs: [R], 0.0 where the mask is 0; None unless every generated token has one.
        response_mask: [R], 1 on generated tokens.
        weight_versions: [R], -1 where the mask is 0; None unless every generated token has one.
    """

    input_tokens: list[int]
    response_tokens: list[int]
    response_logprobs: list[float] | None
    response_mask: list[int]
    weight_versions: list[int] | None = None


def transitions_to_training_data(transitions: Sequence[Transition]) -> list[TrainingDatum]:
    """Merge turns into as few rows as token fidelity allows.

    A turn whose input begins with all tokens so far continues the row: new input tokens have mask 0, output tokens mask
    1. Any other turn begins a new row. Rows without generated tokens are dropped.

    Raises:
        ValueError: token ids are missing, or the number of log-probs or versions differs from the number of tokens.
    """
    for index, transition in enumerate(transitions):
        _check(transition.ac, index)
    runs = split_appending(transitions, _get_tokens)
    return [_build_row(run) for run in runs if any(transition.ac.token_ids for transition in run)]


def _check(action: TokensWithLogprobs, index: int) -> None:
    ids = action.token_ids
    if ids is None:
        raise ValueError(
            f"transition {index} has no token ids, so it cannot be trained on: encode its text (with "
            "chat.conversation.Conversation), or use a server that returns ids"
        )
    for what, values in (("logprobs", action.logprobs), ("weight_versions", action.weight_versions)):
        if values is not None and len(values) != len(ids):
            raise ValueError(
                f"transition {index} has {len(values)} {what} for {len(ids)} tokens; it must have one each"
            )


def _get_tokens(transition: Transition) -> TurnTokens:
    return list(transition.ob.input_ids), transition.ac.token_ids or []


def _build_row(run: list[Transition]) -> TrainingDatum:
    turns = [_get_tokens(transition) for transition in run]
    gaps = [len(get_tokens_between(before, turn) or []) for before, turn in pairwise(turns)]
    (prompt, _), (last_prompt, last_ids) = turns[0], turns[-1]
    # A turn without tokens needs no log-probs.
    actions = [it.ac if it.ac.token_ids else TokensWithLogprobs([], [], weight_versions=[]) for it in run]
    return TrainingDatum(
        input_tokens=prompt,
        response_tokens=(last_prompt + last_ids)[len(prompt) :],
        response_logprobs=join_optional_column([action.logprobs for action in actions], gaps, 0.0),
        response_mask=join_column([[1] * len(ids) for _, ids in turns], gaps, 0),
        weight_versions=join_optional_column([action.weight_versions for action in actions], gaps, NO_VERSION),
    )
