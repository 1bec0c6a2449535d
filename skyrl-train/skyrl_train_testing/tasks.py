"""Tiny tasks with a known optimum that a learning algorithm reaches in seconds on a CPU.

A task defines prompts, tokens per turn and rewards; words are numbers, and 0 is padding. The rewards of the best policy
and of a random one are known.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

Turns = list[list[int]]
"""Token ids that the model generated so far, one list per turn."""


class Task(Protocol):
    """Task of the learning kit."""

    @property
    def num_words(self) -> int:
        """Size of the vocabulary."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of a turn."""
        ...

    @property
    def optimum(self) -> float:
        """Reward of the best policy, summed over turns."""
        ...

    @property
    def at_random(self) -> float:
        """Expected reward of uniform answers."""
        ...

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of the task; a training step asks each."""
        ...

    def reply(self, prompt: list[int], turns: Turns) -> tuple[float, list[int] | None]:
        """Return the reward of the last turn (on its last token) and the environment's reply; None where the episode
        ends."""
        ...


@dataclass(frozen=True)
class Bandit:
    """A word is asked, one word is right: as many bandits as there are questions, with a single token to get right."""

    name: ClassVar[str] = "bandit"
    num_words: int = 8
    num_tokens: int = 1
    optimum: float = 1.0
    at_random: float = 1 / 8

    @property
    def prompts(self) -> list[list[int]]:
        return [[4], [5], [6], [7]]

    def reply(self, prompt: list[int], turns: Turns) -> tuple[float, list[int] | None]:
        return float(turns[0][0] == prompt[0] - 3), None  # 4 -> 1 ... 7 -> 4


@dataclass(frozen=True)
class Copy:
    """Two letters are to be repeated in their order; every right place earns a half."""

    name: ClassVar[str] = "copy"
    num_words: int = 5
    num_tokens: int = 2
    optimum: float = 1.0
    at_random: float = 1 / 5

    @property
    def prompts(self) -> list[list[int]]:
        return [[a, b, 4] for a in range(1, 4) for b in range(1, 4)]

    def right_answer(self, prompt: list[int]) -> list[int]:
        return prompt[:2]

    def reply(self, prompt: list[int], turns: Turns) -> tuple[float, list[int] | None]:
        pairs = zip(turns[0], self.right_answer(prompt), strict=True)
        return sum(word == right for word, right in pairs) / 2, None


@dataclass(frozen=True)
class Sort(Copy):
    """Two letters are to be put in order; every right place earns a half."""

    name: ClassVar[str] = "sort"

    def right_answer(self, prompt: list[int]) -> list[int]:
        return sorted(prompt[:2])


@dataclass(frozen=True)
class ToolUse:
    """Two turns: call the right one of two tools, then repeat its output. The output is in the middle of the response
    and masked; it depends on the tool, so that guessing does not help.
    """

    name: ClassVar[str] = "tool use"
    num_words: int = 9
    num_tokens: int = 1
    optimum: float = 1.0
    at_random: float = 0.25 / 9 + 0.75 / 81

    @property
    def prompts(self) -> list[list[int]]:
        return [[1, secret] for secret in (3, 4, 5, 6)]

    def reply(self, prompt: list[int], turns: Turns) -> tuple[float, list[int] | None]:
        asked = turns[0][0]
        if len(turns) == 1:
            shown = prompt[1] if asked == 7 else 2
            return 0.25 * (asked == 7), [8, shown, 8]
        return 0.75 * (asked == 7 == turns[0][0]) * (turns[1][0] == prompt[1]), None


@dataclass(frozen=True)
class CreditOverTurns:
    """Three turns of one word, each with a separate reward: credit must go to the right turn."""

    name: ClassVar[str] = "credit over turns"
    num_words: int = 7
    num_tokens: int = 1
    optimum: float = 3.0
    at_random: float = 3 / 7

    @property
    def prompts(self) -> list[list[int]]:
        return [[5], [6]]

    def reply(self, prompt: list[int], turns: Turns) -> tuple[float, list[int] | None]:
        right = len(turns) + (prompt[0] == 6)  # words 1, 2, 3 or 2, 3, 4
        return float(turns[-1][0] == right), None if len(turns) == 3 else [prompt[0]]
