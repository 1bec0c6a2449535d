"""Parsers of test logs, and rewards. Pure functions.

A log is what `pytest -rA` prints: its short summary has a line for each test, `PASSED path::name`,
`FAILED path::name - why`, in colour or not.
"""

import json
import re
from collections.abc import Mapping, Sequence

from skyrl_agent.types import Row

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SUMMARY = "short test summary info"


def parse_log_pytest(log: str) -> dict[str, str]:
    """Map each test to PASSED, FAILED or ERROR, with R2E-Gym's names: without the path, `Class.test[1-2]`.

    A line without a test name (a file that cannot be imported) has the key "".
    """
    lines = _parse_summary(log, ("PASSED", "FAILED", "ERROR"))
    return {name.partition("::")[2].replace("::", "."): outcome for name, outcome in lines}


def parse_log_by_path(log: str) -> dict[str, str]:
    """Map each test to its outcome, with pytest's names (`path.py::Class::test[1-2]`) and SWE-bench's, which end at the
    first space.
    """
    lines = _parse_summary(log, ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"))
    return {key: outcome for name, outcome in lines for key in (name.split(" ")[0], name)}


def _parse_summary(log: str, outcomes: Sequence[str]) -> list[tuple[str, str]]:
    _, found, summary = COLOUR.sub("", log).rpartition(SUMMARY)
    lines = (line.partition(" ") for line in (summary if found else "").splitlines())
    return [(_remove_reason(name), outcome) for outcome, _, name in lines if outcome in outcomes]


def _remove_reason(name: str) -> str:
    """Remove the text after the name of a failed test."""
    return name.split(" - ")[0].strip()


def decolor_dict_keys(outcomes: Mapping[str, str]) -> dict[str, str]:
    """Remove terminal colours from the names."""
    return {COLOUR.sub("", name): outcome for name, outcome in outcomes.items()}


def get_reward(parsed: Mapping[str, str], instance: Row) -> float:
    """Return 1 if the tests and their outcomes equal `expected_output_json`, else 0."""
    expected = instance["expected_output_json"]
    expected = decolor_dict_keys(json.loads(expected) if isinstance(expected, str) else expected)
    expected = {_remove_reason(name): outcome for name, outcome in expected.items()}
    return float(len(parsed) == len(expected) and all(parsed.get(name) == expected[name] for name in expected if name))


def compute_passed_fraction(outcomes: Mapping[str, str], names: Sequence[str]) -> float:
    """Return the fraction of `names` that passed (or failed as expected), in [0, 1]; 1 without names."""
    return sum(outcomes.get(name) in ("PASSED", "XFAIL") for name in names) / len(names) if names else 1.0
