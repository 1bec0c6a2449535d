"""Results of graders, which are pure functions of an answer and the expected one; environments make rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyrl_gym.error import InfraError

__all__ = ["Grade", "InfraError", "Invalid", "Score", "Timeout", "reward_of"]


@dataclass(frozen=True)
class Score:
    """The answer was judged."""

    value: float
    """1 is right, 0 is wrong; a grader that gives part credit says so in its docstring."""
    prediction: str | None = None
    """The answer found in the text, as it was compared."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Explanation of the score for people: which test failed, what the output was."""


@dataclass(frozen=True)
class Invalid:
    """Nothing gradable: no answer in the required form, code that does not compile, SQL that does not run."""

    reason: str


@dataclass(frozen=True)
class Timeout:
    """The answer used up its own time (an endless loop, an endless query). A slow server is an `InfraError` instead."""

    seconds: float
    what: str = "the answer"


Grade = Score | Invalid | Timeout | InfraError
"""`InfraError` is returned as a value here, so that one grade of many can carry it; see `reward_of`."""


def reward_of(grade: Grade, *, invalid: float = 0.0, timeout: float = 0.0) -> float:
    """Return the reward that a grade is worth.

    Raises:
        InfraError: the grade is one. It has no worth.
    """
    match grade:
        case Score(value=value):
            return value
        case Invalid():
            return invalid
        case Timeout():
            return timeout
        case InfraError():
            raise grade
