"""Checks and their assertions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import httpx

    from tx_conformance.server import ServerUnderTest


class Violation(Exception):
    """The server violates the protocol; the message says how."""


class Skip(Exception):
    """The check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Check:
    group: str
    """The file it stands in."""
    name: str
    claim: str
    """Statement about a conforming server: the first paragraph of the docstring."""
    run: Callable[["ServerUnderTest"], None]

    @property
    def id(self) -> str:
        return f"{self.group}.{self.name}"


CHECKS: list[Check] = []
"""Checks in the order of their registration."""


def check(function: Callable[["ServerUnderTest"], None]) -> Callable[["ServerUnderTest"], None]:
    """Register a function as a check. The first paragraph of its docstring is the claim."""
    group = function.__module__.rsplit(".", 1)[-1]
    claim = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    CHECKS.append(Check(group, function.__name__, claim, function))
    return function


def expect(condition: object, otherwise: str) -> None:
    """Raises:
    Broken: `otherwise`, unless the condition holds.
    """
    if not condition:
        raise Violation(otherwise)


def expect_equal(got: object, wanted: object, what: str) -> None:
    expect(got == wanted, f"{what}: {shorten(got)}, not {shorten(wanted)}")


def expect_close(got: object, wanted: object, tolerance: float, what: str) -> None:
    """Two numbers, arrays, or lists of arrays differ nowhere by more than `tolerance`."""
    got_flat, wanted_flat = flat(got), flat(wanted)
    expect_equal(got_flat.shape, wanted_flat.shape, f"{what}: number of values")
    if not len(got_flat):
        return
    worst = float(np.max(np.abs(got_flat - wanted_flat)))
    expect(worst <= tolerance, f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}")


def expect_far(got: object, other: object, distance: float, what: str) -> None:
    """Check that the values differ somewhere by more than `distance`."""
    worst = float(np.max(np.abs(flat(got) - flat(other))))
    expect(worst > distance, f"{what}: differ by {worst:.3g} at most, expected more than {distance:.3g}")


def expect_refused(answer: "httpx.Response", *words: str, statuses: tuple[int, ...] = (400, 404, 413, 422)) -> None:
    """Assert that the response is one of these 4xx, and that its body names the problem."""
    expect(answer.status_code in statuses, f"answered {answer.status_code} {shorten(answer.text)}, not {statuses}")
    for word in words:
        expect(word.lower() in answer.text.lower(), f"the refusal does not say {word!r}: {shorten(answer.text)}")


def flat(values: object) -> np.ndarray:
    """All numbers of a nested list of arrays in a row, float64; None becomes NaN."""
    if isinstance(values, list | tuple):
        return np.concatenate([flat(value) for value in values]) if values else np.zeros(0)
    return np.atleast_1d(np.asarray(np.nan if values is None else values, dtype=np.float64)).ravel()


def shorten(value: object, length: int = 240) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + "…"
