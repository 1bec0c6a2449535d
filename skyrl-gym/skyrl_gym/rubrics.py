"""Rewards made of named parts. An environment owns a `Rubric`, scores with it, and reports its parts as metrics.

    rubric = Rubric({"correct": (is_correct, 1.0), "format": (has_answer_tag, 0.1)}, outcome="correct")
    result = rubric.score(completion=text, ground_truth="42")
    result.total            # the reward
    result.metrics()        # {"reward/correct": 1.0, "reward/format": 1.0, "outcome_reward": 1.0}

Independent of environments: the caller of `score` passes the arguments.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.finite_numbers import describe, to_finite
from skyrl_gym.graders.results import InfraError, Invalid, Score, Timeout, reward_of

ARGUMENTS = ("completion", "answer", "ground_truth", "prompt", "messages", "extras")
"""Parameter names by which a reward function requests its inputs.

`completion` is the model's text, `answer` the answer extracted from it (the completion, if the caller gives none),
`messages` the whole conversation, `extras` the dataset row's other columns."""


@dataclass(frozen=True)
class Part:
    """One reward function of a rubric."""

    name: str
    function: Callable[..., Any]
    """`def` or `async def`. Returns a number, a bool or a grade (`skyrl_gym.graders.results`)."""
    weight: float = 1.0


@dataclass(frozen=True)
class RubricResult:
    """Result of a rubric for one answer."""

    total: float
    """Sum of weight times value: the reward."""
    parts: Mapping[str, float]
    """The value of each part, before its weight."""
    outcome: float | None = None
    """Weight times value of the part that is for success; None if the rubric names none."""
    grades: Mapping[str, object] = field(default_factory=dict)
    """Return value of each function, for explanations. Parts behind a closed gate are not called."""

    def metrics(self) -> dict[str, float]:
        """Return the entries for `get_metrics`: `reward/<name>` of every part, and `outcome_reward`."""
        numbers = {f"reward/{name}": value for name, value in self.parts.items()}
        return numbers if self.outcome is None else numbers | {"outcome_reward": self.outcome}


class Rubric:
    """A weighted set of named reward functions.

    Args:
        parts: name to function, or to (function, weight); or a list of `Part`. Functions take what they need by name,
            see `ARGUMENTS`; a parameter that has a default may have any name.
        outcome: name of the part that is for success. It is reported as `outcome_reward`.
        gate: name of a part that must be above 0 for the others to count (a format, say). If it is not, the others are
            0 and are not called.
        arguments: further names that `score` will be given.

    Raises:
        ValueError: no parts, a name twice, an unknown `outcome` or `gate`, a weight that is no finite number.
        TypeError: a part that is no function, or a function that asks for what there is not.
    """

    def __init__(
        self,
        parts: Mapping[str, Callable[..., object] | tuple[Callable[..., object], float]] | Sequence[Part],
        *,
        outcome: str | None = None,
        gate: str | None = None,
        arguments: Iterable[str] = (),
    ) -> None:
        self.parts = [_make_part(*item) for item in parts.items()] if isinstance(parts, Mapping) else list(parts)
        self.outcome = outcome
        self.gate = gate
        self.arguments = (*ARGUMENTS, *arguments)
        self._check()
        self._wanted = {part.name: _get_argument_names(part, self.arguments) for part in self.parts}
        # The gate is evaluated first.
        self._order = sorted(self.parts, key=lambda part: part.name != gate)

    def _check(self) -> None:
        names = [part.name for part in self.parts]
        if not names:
            raise ValueError("a rubric needs at least one part")
        if len(set(names)) < len(names):
            raise ValueError(f"parts of a rubric must have different names; got {', '.join(names)}")
        for setting in ("outcome", "gate"):
            value = getattr(self, setting)
            if value is not None and value not in names:
                raise ValueError(f"{setting} must be one of the parts {', '.join(names)}; got {value!r}")
        for part in self.parts:
            if to_finite(part.weight) is None:
                raise ValueError(
                    f"the weight of rubric part {part.name!r} must be a finite number; got {part.weight!r}"
                )

    def score(self, **arguments: object) -> RubricResult:
        """Score one answer. `async def` parts run concurrently on a separate event loop.

        Raises:
            InfraError: a part could not be scored. It is never scored 0.
            TypeError: an argument is unknown to all parts, or an argument that a part requires is missing.
            RuntimeError: called on a running event loop with `async def` parts: await `score_async` there.
        """
        if not any(inspect.iscoroutinefunction(part.function) for part in self.parts):
            return _finish_without_waiting(self.score_async(**arguments))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.score_async(**arguments))
        raise RuntimeError("this rubric has async parts and an event loop runs: use `await rubric.score_async(...)`")

    async def score_async(self, **arguments: object) -> RubricResult:
        """Score as `score` does, for `async def step`."""
        self._check_arguments(arguments)
        arguments.setdefault("answer", arguments.get("completion"))
        grades: dict[str, object] = {}
        values: dict[str, float] = {part.name: 0.0 for part in self.parts}
        gates = [part for part in self._order if part.name == self.gate]
        others = [part for part in self._order if part.name != self.gate]
        for group in (gates, others):
            if group is others and gates and values[gates[0].name] <= 0:
                break
            for part, grade in zip(group, await self._grade(group, arguments), strict=True):
                grades[part.name] = grade
                values[part.name] = _get_value(part, grade)
        weighted = {part.name: part.weight * values[part.name] for part in self.parts}
        outcome = None if self.outcome is None else weighted[self.outcome]
        return RubricResult(total=sum(weighted.values()), parts=values, outcome=outcome, grades=grades)

    async def _grade(self, parts: list[Part], arguments: dict[str, object]) -> list[object]:
        answers = [self._call(part, arguments) for part in parts]
        waiting = [index for index, answer in enumerate(answers) if inspect.isawaitable(answer)]
        if waiting:
            _raise_if_awaitable(parts[waiting[0]], answers)
            for index, grade in zip(waiting, await asyncio.gather(*(answers[i] for i in waiting)), strict=True):
                answers[index] = grade
        return answers

    def _call(self, part: Part, arguments: dict[str, object]) -> Any:
        required, optional = self._wanted[part.name]
        missing = [name for name in required if name not in arguments]
        if missing:
            raise TypeError(f"rubric part {part.name!r} needs {', '.join(missing)}; score received {_names(arguments)}")
        return part.function(**{name: arguments[name] for name in (*required, *optional) if name in arguments})

    def _check_arguments(self, arguments: Mapping[str, object]) -> None:
        unknown = [name for name in arguments if name not in self.arguments]
        if unknown:
            raise TypeError(f"score received {', '.join(unknown)}; this rubric accepts {_names(self.arguments)}")


def _make_part(name: str, given: Any) -> Part:
    return Part(name, *given) if isinstance(given, tuple) else Part(name, given)


def _get_argument_names(part: Part, available: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the argument names that a part's function requires, and those that it accepts."""
    if not callable(part.function):
        raise TypeError(f"rubric part {part.name!r} must be a function; got {part.function!r}")
    required, optional = [], []
    for parameter in inspect.signature(part.function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            optional += [name for name in available if name not in required]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"rubric part {part.name!r}: parameter {parameter.name!r} must be a keyword parameter")
        elif parameter.default is not parameter.empty:
            optional.append(parameter.name)
        elif parameter.name in available:
            required.append(parameter.name)
        else:
            raise TypeError(
                f"rubric part {part.name!r} asks for {parameter.name!r}; available: {_names(available)}. Give it a "
                "default, or list it in Rubric(arguments=...)"
            )
    return required, list(dict.fromkeys(optional))


def _get_value(part: Part, grade: object) -> float:
    if isinstance(grade, Score | Invalid | Timeout | InfraError):
        grade = reward_of(grade)
    number = to_finite(int(grade) if isinstance(grade, bool) else grade)
    if number is None:
        raise TypeError(f"rubric part {part.name!r} must return a finite number or a grade; got {describe(grade)}")
    return number


def _finish_without_waiting(coroutine: Any) -> RubricResult:
    """Run a coroutine that awaits nothing: no event loop is needed, so it works on a running one too."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("a rubric of plain functions must not await")


def _raise_if_awaitable(part: Part, answers: list[object]) -> None:
    """Raise a RuntimeError for an awaitable returned by a plain function, which `score` cannot detect in advance."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        for answer in answers:
            if inspect.iscoroutine(answer):
                answer.close()
        raise TypeError(
            f"rubric part {part.name!r} returned an awaitable; declare it `async def` or await `score_async`"
        ) from None


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
