"""Function calls against accepted ones, by the rules of the Berkeley Function-Calling Leaderboard
(https://gorilla.cs.berkeley.edu/leaderboard.html): names and arguments are compared, nothing is run.

An expected call is `{name: {argument: [accepted value, ...]}}`. An argument with "" in its values is optional.
"""

import re
from collections.abc import Mapping, Sequence

from skyrl_gym.graders.results import Score

AcceptedArguments = Mapping[str, Sequence[object]]
ExpectedCall = Mapping[str, AcceptedArguments]
"""Call of one function."""

Call = tuple[str, Mapping[str, object]]
"""Name and arguments."""

_IGNORED = re.compile(r"[\s,./\-_*^]")


def grade_calls(calls: Sequence[Call], expected: Sequence[ExpectedCall]) -> Score:
    """Score 1 if the calls are the expected ones, in any order and none besides; else 0."""
    prediction = "; ".join(f"{name}({', '.join(arguments)})" for name, arguments in calls)
    is_right = len(calls) == len(expected) and _has_perfect_matching(calls, expected)
    return Score(float(is_right), prediction[:1000])


def _has_perfect_matching(calls: Sequence[Call], expected: Sequence[ExpectedCall]) -> bool:
    """Test for a perfect matching by augmenting paths: a call may fit several expected ones, so greed could fail."""
    call_of: dict[int, int] = {}

    def pair(call: int, tried: set[int]) -> bool:
        for number, wanted in enumerate(expected):
            if number not in tried and _is_accepted(calls[call], wanted):
                tried.add(number)
                if number not in call_of or pair(call_of[number], tried):
                    call_of[number] = call
                    return True
        return False

    return all(pair(call, set()) for call in range(len(calls)))


def _is_accepted(call: Call, expected: ExpectedCall) -> bool:
    name, arguments = call
    return name in expected and has_accepted_arguments(arguments, expected[name])


def has_accepted_arguments(arguments: Mapping[str, object], accepted: AcceptedArguments) -> bool:
    """Test that every argument has an accepted value, that none is unknown, and that only optional ones are missing."""
    if not all(name in accepted for name in arguments):
        return False
    return all(
        any(_is_equal(arguments[name], value) for value in values) if name in arguments else "" in values
        for name, values in accepted.items()
    )


def _is_equal(given: object, accepted: object) -> bool:
    """Compare two values of JSON: numbers by value, texts without case, white space and punctuation. An accepted object
    has lists of accepted values, as arguments have."""
    match accepted:
        case bool() | None:
            return given is accepted
        case int() | float():
            return isinstance(given, int | float) and not isinstance(given, bool) and given == accepted
        case str():
            return isinstance(given, str) and _normalize_text(given) == _normalize_text(accepted)
        case Mapping():
            lists = {name: value if isinstance(value, list) else [value] for name, value in accepted.items()}
            return isinstance(given, Mapping) and has_accepted_arguments(given, lists)
        case list() | tuple():
            return (
                isinstance(given, list | tuple) and len(given) == len(accepted) and all(map(_is_equal, given, accepted))
            )
    return False


def _normalize_text(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"') or text
