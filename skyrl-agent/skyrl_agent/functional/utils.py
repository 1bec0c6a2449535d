"""Published names of `chat.transitions`, and a decorator for agents of users."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_agent.chat.transitions import (
    Observation,
    TokensWithLogprobs,
    TrainingDatum,
    Transition,
    transitions_to_training_data,
)
from skyrl_agent.types import MetaInfo

__all__ = [
    "Observation",
    "TokensWithLogprobs",
    "TrainingDatum",
    "Transition",
    "record_transition",
    "transitions_to_training_data",
]

Generate = Callable[..., Awaitable[tuple[str, MetaInfo]]]


def record_transition(generate: Generate) -> Generate:
    """Decorate an async method that queries a model: (self, *, input_ids, ...) -> (text, meta). Each reply is appended
    to `self.transitions`; if the method raises, nothing is.

    Raises:
        TypeError: `input_ids` was not given by keyword.
        BackendError: the number of log-probs differs from the number of tokens.
    """

    @functools.wraps(generate)
    async def recorded(self: Any, *args: object, **kwargs: Any) -> tuple[str, MetaInfo]:
        if "input_ids" not in kwargs:
            raise TypeError(f"{generate.__name__} must be called with the keyword input_ids: its tokens are recorded")
        observation = Observation(list(kwargs["input_ids"]))
        text, meta = await generate(self, *args, **kwargs)
        metrics: dict[str, object] = {"finish_reason": meta.get("finish_reason")}
        self.transitions.append(Transition(observation, TokensWithLogprobs.from_reply(text, meta), metrics=metrics))
        return text, meta

    return recorded
