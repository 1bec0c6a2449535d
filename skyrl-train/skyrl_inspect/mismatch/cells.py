"""Cells of the measurement: one engine in one number format under one sampling setting, with the trainer's log-probs of
the same tokens.

Shapes: N tokens of all answers of the cell, one answer after the other.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from skyrl_inspect.mismatch.answers import Answers, Sampling
from skyrl_inspect.mismatch.gap import Gap, compute_gap, mean_difference

TrainerDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineName:
    """Name of an engine, with its options."""

    backend: str
    dtype: str | None
    """None: a server that does not say."""

    attention: str = "default"
    """The attention setting of the engine; `default`: its own choice."""

    url: str = ""
    """Address of a server that was started elsewhere; empty for an engine started here."""

    def __str__(self) -> str:
        attention = "" if self.attention == "default" else f" {self.attention}"
        return f"{self.backend}{f' at {self.url}' if self.url else ''} {self.dtype or 'unknown dtype'}{attention}"


@dataclass(frozen=True)
class TokenGap:
    """Difference of engine and trainer on one token."""

    answer: int
    position: int
    """Position in prompt and response together, from 0."""

    token_id: int
    rollout: float
    train: float


@dataclass(eq=False, kw_only=True)
class Cell:
    """Log-probs of one engine under one sampling setting, and of the trainer in either number format."""

    engine: EngineName
    sampling: Sampling
    answers: Answers
    train: dict[TrainerDtype, torch.Tensor] = field(default_factory=dict)
    """[N] by the trainer's number format."""

    replayed: dict[TrainerDtype, torch.Tensor] = field(default_factory=dict)
    """[N]: the same over the experts that the engine chose (`routing_replay=R3`); empty if it returned none."""

    differing: dict[TrainerDtype, float] = field(default_factory=dict)
    """Share of these experts that the trainer would not choose."""

    @cached_property
    def rollout(self) -> torch.Tensor:
        """[N]"""
        return torch.tensor([value for row in self.answers.log_probs for value in row])

    @cached_property
    def positions(self) -> torch.Tensor:
        """[N], in prompt and answer together."""
        rows = zip(self.answers.prompts, self.answers.responses, strict=True)
        starts_and_lengths = [(len(prompt), len(response)) for prompt, response in rows]
        return torch.cat([torch.arange(start, start + length) for start, length in starts_and_lengths])

    @cached_property
    def finite(self) -> torch.Tensor:
        """[N] bool: the tokens that the engine gave a number for."""
        return self.rollout.isfinite()

    @property
    def num_not_finite(self) -> int:
        return int((~self.finite).sum())

    def gap(self, dtype: TrainerDtype, clip_low: float, clip_high: float) -> Gap | None:
        """Compare the log-probs. Returns: None if no token has a number."""
        if not self.finite.any():
            return None
        return compute_gap(self.train[dtype][self.finite], self.rollout[self.finite], clip_low, clip_high)

    def replayed_gap(self, dtype: TrainerDtype, clip_low: float, clip_high: float) -> Gap | None:
        """Compare the log-probs over the engine's experts. Returns: None without replayed log-probs."""
        if dtype not in self.replayed or not self.finite.any():
            return None
        return compute_gap(self.replayed[dtype][self.finite], self.rollout[self.finite], clip_low, clip_high)

    def mean(self, dtype: TrainerDtype) -> float:
        """Mean difference to the trainer in that format; infinite if the engine gave something that is no number."""
        return float("inf") if self.num_not_finite else mean_difference(self.train[dtype], self.rollout)

    @property
    def rounding(self) -> float:
        """Effect of bfloat16 on these tokens: the mean difference of the trainer in bfloat16 to itself in float32."""
        return mean_difference(self.train["bfloat16"], self.train["float32"])

    def worst(self, dtype: TrainerDtype, count: int) -> list[TokenGap]:
        """The tokens on which the two differ most, the worst first."""
        difference = torch.where(self.finite, (self.train[dtype] - self.rollout).abs(), torch.inf)
        tokens = [(answer, token) for answer, row in enumerate(self.answers.responses) for token in row]
        return [
            TokenGap(
                answer=tokens[index][0],
                position=int(self.positions[index]),
                token_id=tokens[index][1],
                rollout=self.rollout[index].item(),
                train=self.train[dtype][index].item(),
            )
            for index in difference.topk(min(count, len(difference))).indices.tolist()
        ]
