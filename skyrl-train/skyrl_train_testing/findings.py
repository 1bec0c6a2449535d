"""Rules of the kits, and their errors: one error with every broken rule and its numbers.

An invariance has a name, a rule and a likely cause, all three here and nowhere else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from skyrl_train.errors import SkyRLError


@dataclass(frozen=True)
class Invariance:
    """A rule in words, and what usually breaks it."""

    rule: str
    usual_cause: str


INVARIANCES: Mapping[str, Invariance] = {
    "form": Invariance(
        "the output has the types that the trainer expects, one number per token, and nothing is raised",
        "a reduced loss (`.mean()`): reducing is the trainer's business, over the whole mini-batch",
    ),
    "finite": Invariance(
        "the output for unmasked tokens is neither NaN nor infinite",
        "a division by a count or a standard deviation that can be 0",
    ),
    "deterministic": Invariance(
        "the same input gives the same bits",
        "random numbers of its own; randomness must come with the batch (`noise` of a token selector)",
    ),
    "inputs_unchanged": Invariance(
        "input tensors and settings are not modified",
        "an operation in place (`x *= mask`, `x[...] = 0`, `x.clamp_()`)",
    ),
    "masked_garbage": Invariance(
        "NaN, infinity or any other number where the mask is 0 changes neither output nor gradient",
        "a multiplication by the mask (NaN * 0 is NaN): use `torch.where(mask != 0, x, 0.0)` before any arithmetic",
    ),
    "masked_output": Invariance(
        "the output for masked tokens is 0",
        "a result that is not masked, or is masked by the wrong mask",
    ),
    "masked_gradient": Invariance(
        "masked tokens have no gradient",
        "a sum or mean over all columns instead of those of the mask",
    ),
    "gradient": Invariance(
        "every unmasked token has a nonzero gradient",
        "a `.detach()` or `torch.no_grad()` that covers too much",
    ),
    "gradient_direction": Invariance(
        "a gradient step moves the log-prob of every token in the right direction",
        "a wrong sign",
    ),
    "row_order": Invariance(
        "the order of the rows changes nothing",
        "something that runs over rows (`cumsum(0)`, neighbours), or takes groups to be consecutive",
    ),
    "micro_batches": Invariance(
        "the division into micro-batches changes nothing",
        "a mean, maximum or count over rows inside the function",
    ),
    "data_parallel": Invariance(
        "the division over 1, 2 or 4 workers changes nothing",
        "a mean, maximum or count over rows inside the function",
    ),
    "padding": Invariance(
        "columns of padding, on the left or on the right, change nothing",
        "a mean over the width (`.mean(-1)`, `x.shape[1]`), or a fixed column (`x[:, -1]`)",
    ),
    "float64": Invariance(
        "float32 agrees with float64 to 1e-5",
        "half precision inside, or a difference of large numbers (mean of squares minus square of the mean)",
    ),
    "group_names": Invariance(
        "the names of groups change nothing",
        "arithmetic on group names, or groups sorted by name",
    ),
    "other_groups": Invariance(
        "other groups in the batch change nothing",
        "a mean or standard deviation of the batch in place of the group's",
    ),
    "group_constant": Invariance(
        "a constant added to the rewards of a whole group changes nothing",
        "no baseline, or the baseline of another group",
    ),
    "reward_direction": Invariance(
        "a higher reward of a token never lowers the advantage of that token, and raises it somewhere",
        "a wrong sign, or rewards that are not read",
    ),
    "empty_rows": Invariance(
        "a row with an empty mask has no effect",
        "a count of rows that includes those (`mask.shape[0]`)",
    ),
    "skipped_update": Invariance(
        "a gradient that is not finite changes no weight and is reported",
        "an optimizer step that is taken whatever the gradient's norm is",
    ),
    "forgotten_gradient": Invariance(
        "a step uses the gradient of its own mini-batch alone",
        "gradients that are not cleared after a step, or after one that was skipped",
    ),
    "sums_to_one": Invariance(
        "the weights of a mini-batch add up to 1",
        "a wrong count of tokens, rows or prompts",
    ),
    "agreement": Invariance(
        "two implementations of the same formula agree",
        "positions, masks or the temperature are treated differently in the two",
    ),
}


@dataclass(frozen=True)
class Violation:
    """Violation of one rule.

    Attributes:
        subject: the function that breaks it.
        invariance: the rule's name.
        found: the numbers, in words.
    """

    subject: str
    invariance: str
    found: tuple[str, ...]

    def __str__(self) -> str:
        about = INVARIANCES[self.invariance]
        shown = "".join(f"\n     {text}" for text in self.found[:2])
        more = f"\n     and {len(self.found) - 2} more like these" if len(self.found) > 2 else ""
        return f"{self.invariance}: {about.rule}.{shown}{more}\n     The usual cause: {about.usual_cause}."


class InvarianceError(SkyRLError, AssertionError):
    """Functions break rules that every function of their kind keeps. The text names each, with numbers."""

    def __init__(self, violations: Sequence[Violation]):
        lines = []
        for subject in dict.fromkeys(violation.subject for violation in violations):
            own = [violation for violation in violations if violation.subject == subject]
            lines.append(f"{subject} violates {len(own)} invariance{'' if len(own) == 1 else 's'}:")
            lines += [f"{number:3}. {violation}" for number, violation in enumerate(own, start=1)]
        super().__init__("\n".join(lines))
        self.violations = tuple(violations)

    @property
    def names(self) -> list[str]:
        """Names of the violated invariances."""
        return [violation.invariance for violation in self.violations]


class Findings:
    """Collector of the violations that one check finds; `finish` raises them together.

    Args:
        subject: what is checked, for the error.
        exempt: invariances that do not apply, each with the reason.

    Raises:
        ValueError: an exempt name is not an invariance, or has no reason.
    """

    def __init__(self, subject: str, exempt: Mapping[str, str] | None = None):
        self._subject = subject
        self._exempt = dict(exempt or {})
        self._found: dict[str, list[str]] = {}
        for name, reason in self._exempt.items():
            if name not in INVARIANCES or not reason:
                raise ValueError(
                    f"exempt is {{invariance: reason}} with names out of {', '.join(INVARIANCES)}; got {name!r}: "
                    f"{reason!r}"
                )

    def add(self, invariance: str, text: str) -> None:
        assert invariance in INVARIANCES, invariance
        if invariance not in self._exempt:
            self._found.setdefault(invariance, []).append(text)

    def are_exempt(self, *invariances: str) -> bool:
        """Return whether none of these needs a check."""
        return all(name in self._exempt for name in invariances)

    def has(self, invariance: str) -> bool:
        return invariance in self._found

    def check_finite(self, words: str, what: str, value: torch.Tensor, kept: torch.Tensor) -> None:
        """Add a violation of `finite` where a kept position holds NaN or infinity."""
        self.compare("finite", words, what, value.nan_to_num(posinf=0.0, neginf=0.0), value, kept)

    def check_deterministic(self, words: str, outputs: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """The same bits twice, whatever torch's random state is."""
        with self.attempt("deterministic", words), torch.random.fork_rng(devices=[]):
            results = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                results.append(outputs())
            first, second = results
            for what, value in first.items():
                same = dict(relative=0.0, absolute=0.0)
                self.compare("deterministic", "the second time", what, value, second[what], ~value.isnan(), **same)

    @contextmanager
    def attempt(self, invariance: str, words: str) -> Iterator[None]:
        """Record an exception of the function under test as a violation, and continue the check."""
        try:
            yield
        except Exception as error:  # a user's function may raise anything
            self.add(invariance, f"{words}: it raised {type(error).__name__}: {error}")

    def compare(
        self,
        invariance: str,
        words: str,
        what: str,
        expected: torch.Tensor,
        got: torch.Tensor,
        kept: torch.Tensor | None = None,
        *,
        relative: float = 1e-5,
        absolute: float = 1e-6,
    ) -> None:
        """Add a violation where `got` differs from `expected` by more than `absolute + relative * |expected|` at a
        `kept` position; NaN differs from everything, itself included.

        Args:
            words: the circumstance, for the person who reads ("with the rows in reverse order").
            what: which output.
        """
        if expected.shape != got.shape:
            self.add(invariance, f"{words}, {what} has the shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
            return
        expected, got = expected.detach().double(), got.detach().double()
        kept = torch.ones_like(expected, dtype=torch.bool) if kept is None else kept.bool()
        off = (got - expected).abs()
        wrong = kept & ~(off <= absolute + relative * expected.abs())
        if wrong.any():
            severity = torch.where(wrong, off.nan_to_num(nan=torch.inf, posinf=torch.inf), -1.0)
            place = tuple(int(i) for i in torch.unravel_index(severity.argmax(), severity.shape))
            self.add(
                invariance,
                f"{words}: {what}{_describe(place)} expected {expected[place].item():.7g}, got {got[place].item():.7g}"
                f" ({int(wrong.sum())} of {int(kept.sum())} differ)",
            )

    def finish(self) -> None:
        """Raise InvarianceError if there are violations."""
        if self._found:
            raise InvarianceError(
                [
                    Violation(self._subject, name, tuple(self._found[name]))
                    for name in INVARIANCES
                    if name in self._found
                ]
            )


def _describe(place: tuple[int, ...]) -> str:
    if len(place) == 2:
        return f" of row {place[0]}, token {place[1]}:"
    return f" at {list(place)}:" if place else ":"
