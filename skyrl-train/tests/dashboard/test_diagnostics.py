"""Signs that a run has stopped learning: each needs all of its conditions."""

from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import write_run
from starlette.testclient import TestClient

from skyrl_inspect.dashboard.defaults import Defaults
from skyrl_inspect.dashboard.diagnostics import MIN_STEPS, find_diagnostics
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app

Curves = dict[str, Any]
LEARNING: Curves = {
    "reward/avg_raw_reward": [0.2] * 4 + [0.5] * 8 + [0.8] * 4,
    "reward/avg_pass_at_8": [0.6] * 16,
    "loss/zero_variance_share": [0.1] * 8 + [0.9] * 8,
    "eval/all/avg_score": [0.1, None, 0.5, 0.9, 0.8],
    "policy/policy_entropy": [1.0] * 8 + [0.2] * 8,
    "policy/rollout_train_ess": [1.0] * 8 + [0.95] * 8,
    "generate/stop_reason/length": [0.9] * 8 + [0.1] * 8,
    "generate/weight_version_lag_mean": [0.0] * 8 + [2.0] * 8,
}
CHANGES: dict[str, tuple[Curves, str]] = {
    "evaluation falls": (
        {"eval/all/avg_score": [0.1, 0.9, 0.2, 0.4]},
        "The training reward rose from 0.2 to 0.8, but the evaluation went from 0.1 (best: 0.9) to 0.3: training "
        "optimizes something else than the evaluation measures.",
    ),
    "evaluation does not follow": (
        {"eval/all/avg_score": [0.14, 0.15, 0.15, 0.15]},
        "The training reward rose from 0.2 to 0.8, but the evaluation went from 0.14 (best: 0.15) to 0.15: training "
        "optimizes something else than the evaluation measures.",
    ),
    "evaluation below 0 falls": (
        {"eval/all/avg_score": [-0.2, -0.1, -0.6, -0.8]},
        "The training reward rose from 0.2 to 0.8, but the evaluation went from -0.2 (best: -0.1) to -0.7: training "
        "optimizes something else than the evaluation measures.",
    ),
    "entropy collapses": (
        {"policy/policy_entropy": [1.0] * 8 + [0.02] * 8},
        "The entropy fell from 1 to 0.02 nats a token. In 90% of the groups all rewards are equal, and 40% of the "
        "prompts have no rewarded response: few groups give a training signal.",
    ),
    "answers are cut": (
        {"generate/stop_reason/length": [0.0] * 8 + [0.35] * 8},
        "35% of the responses are truncated at the length limit.",
    ),
    "weights are stale": (
        {"policy/rollout_train_ess": [1.0] * 8 + [0.5] * 8},
        "Trained tokens are 2 weight versions old, and the policy has diverged from the one that sampled them "
        "(effective sample "
        "size 0.5, below 0.9).",
    ),
}


def find_in(curves: Curves) -> list[str]:
    return find_diagnostics(lambda name: curves.get(name, []), curves)


@pytest.mark.parametrize("name", CHANGES)
def test_diagnostic_states_its_evidence(name: str):
    changes, expected = CHANGES[name]
    assert find_in(LEARNING | changes) == [expected]


@pytest.mark.parametrize(
    ("name", "spared_by"),
    [
        ("evaluation falls", {"reward/avg_raw_reward": [0.8] * 16}),  # it learns nothing else
        ("evaluation falls", {"eval/all/avg_score": [0.1, 0.2, 0.9]}),  # the last one has just risen
        ("evaluation falls", {"eval/all/avg_score": [-0.9, -0.7, -0.5]}),  # below 0, and better each time
        ("evaluation does not follow", {"eval/all/avg_score": [0.9, 0.91, 0.9]}),  # it was good from the beginning
        ("entropy collapses", {"reward/avg_pass_at_8": [1.0] * 16}),  # all is solved
        ("entropy collapses", {"loss/zero_variance_share": [0.5] * 16}),
        ("weights are stale", {"generate/weight_version_lag_mean": [0.0] * 16}),  # another cause than old weights
    ],
)
def test_single_condition_raises_no_diagnostic(name: str, spared_by: Curves):
    assert find_in(LEARNING | CHANGES[name][0] | spared_by) == []


def test_healthy_short_or_empty_runs_have_no_diagnostics():
    assert find_in(LEARNING) == []
    everything: Curves = LEARNING
    for changes, _ in CHANGES.values():
        everything = everything | changes
    assert len(find_in(everything)) == 4
    assert find_in(everything | {"reward/avg_raw_reward": [0.5] * (MIN_STEPS - 1)}) == []
    assert find_in({"reward/avg_raw_reward": [0.5] * 16}) == []
    assert find_in({}) == []


def test_run_page_shows_diagnostics(tmp_path: Path):
    run = write_run(tmp_path / "cut", 0)
    for step in range(1, MIN_STEPS + 1):
        run.append_metrics(step, {"reward/avg_raw_reward": 0.5, "generate/stop_reason/length": 0.5})
    with TestClient(make_app(RunsFolder(tmp_path), Defaults()), base_url="http://localhost") as client:
        found = client.get("/api/run", params={"run": "cut"}).json()["diagnostics"]
    assert found == ["50% of the responses are truncated at the length limit."]
