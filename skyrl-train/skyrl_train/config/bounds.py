"""Bounds of numbers, declared at the setting: `delta: Annotated[float, AtLeast(0)] = 0.2`.

Bounds of losses and estimators are checked when the settings of a run are validated, not at construction.
"""

from dataclasses import dataclass, fields
from typing import Any, get_args

from skyrl_train.config.typed import get_annotations
from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Above:
    """Greater than a number."""

    bound: float

    def find_violation(self, value: float | None, section: object, name: str) -> str | None:
        """Return the rule that `value` violates, or None. An allowed null violates none."""
        return None if value is None or value > self.bound else f"must be greater than {self.bound:g}; got {value}"


@dataclass(frozen=True)
class AtLeast:
    """A number or greater."""

    bound: float

    def find_violation(self, value: float | None, section: object, name: str) -> str | None:
        return None if value is None or value >= self.bound else f"must be {self.bound:g} or greater; got {value}"


@dataclass(frozen=True)
class Between:
    """Bounds from one number to another, both included."""

    low: float
    high: float

    def find_violation(self, value: float | None, section: object, name: str) -> str | None:
        if value is None or self.low <= value <= self.high:
            return None
        return f"must be from {self.low:g} to {self.high:g}; got {value}"


@dataclass(frozen=True)
class NotAbove:
    """Upper bound that is the value of another setting of the same section."""

    other: str

    def find_violation(self, value: object, section: object, name: str) -> str | None:
        limit = getattr(section, self.other)
        if value is None or limit is None or value <= limit:
            return None
        return f"={value} must not be above {name}.{self.other}={limit}: the range would be empty"


def check_bounds(section: Any, name: str) -> None:
    """Raise ConfigError if a setting of the dataclass instance `section`, called `name`, is outside its bounds."""
    hints = get_annotations(type(section))
    for field in fields(section):
        for mark in get_args(hints[field.name])[1:]:
            if isinstance(mark, Above | AtLeast | Between | NotAbove):
                rule = mark.find_violation(getattr(section, field.name), section, name)
                if rule is not None:
                    raise ConfigError(f"{name}.{field.name}{'' if rule.startswith('=') else ' '}{rule}")
