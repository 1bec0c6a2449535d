"""Rules of diagnostics on planted failures and healthy runs."""

import pytest
from planted_runs import FAILURES, HEALTHY, Row, build_run

from skyrl_inspect.diagnostics.history import History
from skyrl_inspect.diagnostics.rules import PAGE, RULES, Diagnostic, RunSettings, find_diagnostics

SEEDS = range(3)


def watch(rows: list[Row]) -> list[Diagnostic]:
    """Return what the rules find in each step."""
    history, found = History(), []
    for step, row in enumerate(rows, 1):
        history.append(step, row)
        found += find_diagnostics(history)
    return found


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_has_no_diagnostic(name: str):
    for seed in SEEDS:
        assert watch(build_run(HEALTHY[name], seed)) == []


@pytest.mark.parametrize("name", FAILURES)
def test_planted_failure_is_detected_within_delay(name: str):
    failure = FAILURES[name]
    for seed in SEEDS:
        found = watch(build_run(failure.change, seed))
        own = [diagnostic for diagnostic in found if diagnostic.name == failure.name]
        assert own and own[0].step <= failure.onset + failure.delay, found[:3]
        assert min(diagnostic.step for diagnostic in found) >= failure.onset, found[0]
        assert abs(own[0].onset - failure.onset) <= failure.delay
        assert own[0].evidence and own[0].advice and own[0].page == PAGE


def test_each_rule_has_planted_failure():
    assert {rule.name for rule in RULES} == {failure.name for failure in FAILURES.values()}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_short_run_has_no_diagnostic(number: int):
    for failure in FAILURES.values():
        assert watch(build_run(failure.change)[:number]) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_documented(rule, pytestconfig: pytest.Config):
    assert f"| `{rule.name}` |" in (pytestconfig.rootpath / PAGE.partition("#")[0]).read_text()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_names_existing_settings(rule):
    from skyrl_inspect.defaults import get_default_settings

    assert set(rule.settings) <= get_default_settings().keys()


def test_changed_settings_come_first_with_their_defaults():
    settings = RunSettings({"a": 1, "b": 2.0, "c": None}, {"a": 1, "b": 1.0, "c": None})
    assert settings.describe(["a", "b", "missing", "c"]) == ("b=2.0 (default 1.0)", "a=1", "c=None")


def test_recorded_curves_give_same_diagnostics_as_steps():
    rows = build_run(FAILURES["reward falls to 0"].change)
    names = {name for row in rows for name in row}
    curves = []
    for name in names:
        points = [(step, row[name]) for step, row in enumerate(rows, 1) if name in row]
        curves.append((name, [step for step, _ in points], [value for _, value in points]))
    history = History()
    for step, row in enumerate(rows, 1):
        history.append(step, row)
    assert find_diagnostics(History.from_curves(curves)) == find_diagnostics(history) != []
