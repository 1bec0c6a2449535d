"""Tutorials run from end to end in this process, as scripts, and each shows what it claims."""

import importlib
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from starlette.testclient import TestClient

import skyrl_gym
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.defaults import Defaults
from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.entrypoints import main_base
from skyrl_train.utils.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "examples" / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("1*.py"))

Play = Callable[[str], dict[str, Any]]


@pytest.fixture
def tutorials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Their folder on the search path, and runs in a folder of the test. What they import and register goes with it."""
    monkeypatch.setenv("TUTORIAL_RUNS", str(tmp_path))
    monkeypatch.syspath_prepend(TUTORIALS)
    for name in ("configure_logging", "shutdown_ray"):  # the log and Ray are those of the other tests, too
        monkeypatch.setattr(main_base, name, lambda *_: None)
    handler, modules = signal.getsignal(signal.SIGTERM), set(sys.modules)
    registries: list[Any] = [PolicyLossRegistry, AdvantageEstimatorRegistry]
    registered = [set(registry.list_available()) for registry in registries]
    environments = set(skyrl_gym.registry)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "examples")):
            del sys.modules[name]
    for registry, names in zip(registries, registered, strict=True):
        for name in set(registry.list_available()) - names:
            registry.unregister(name)
    for name in set(skyrl_gym.registry) - environments:
        skyrl_gym.deregister(name)


@pytest.fixture
def play(tutorials: Path) -> Play:
    """`play("101")`: run that tutorial as a script; its variables."""
    return lambda number: runpy.run_path(str(next(TUTORIALS.glob(f"{number}_*.py"))), run_name="__main__")


def rises(rewards: list[float], factor: float) -> bool:
    return fmean(rewards[-3:]) > factor * fmean(rewards[:3])


def test_page_lists_short_tutorials():
    page = (ROOT / "docs" / "tutorials.md").read_text()
    assert len(SCRIPTS) == 7
    assert [script.name for script in SCRIPTS if script.name not in page] == []
    assert [script.name for script in SCRIPTS if len(script.read_text().splitlines()) >= 80] == []


def test_first_run_increases_reward(play: Play):
    assert rises(play("101")["rewards"], 3)


@pytest.mark.slow
def test_custom_environment_is_checked_and_learned(play: Play):
    variables = play("102")
    assert rises(variables["rewards"], 3)
    metrics = RunFolder(variables["cfg"].trainer.run_dir).read_metrics()
    assert metrics[-1]["environment/num_right"] == pytest.approx(8 * variables["rewards"][-1])


@pytest.mark.full
def test_custom_tool_is_called_when_calls_are_rewarded(play: Play):
    variables = play("103")
    assert rises(variables["rewards"], 1.5)
    assert variables["turns"][-1] > 1.8 > variables["turns"][0]


@pytest.mark.slow
def test_custom_loss_and_estimator_train(play: Play):
    variables = play("104")
    assert rises(variables["rewards"], 2)
    assert all(1 / 8 <= share < 1 for share in variables["shares"])


@pytest.mark.full
def test_supervised_training_teaches_format_and_rl_content(play: Play):
    variables = play("105")
    assert variables["losses"][-1] < 0.2 * variables["losses"][0]
    assert variables["rewards"][0] > 0.1
    assert rises(variables["rewards"], 1.5)


@pytest.mark.full
def test_asynchronous_run_learns_from_stale_responses(play: Play):
    variables = play("106")
    assert rises(variables["rewards"], 2)
    assert 0 < max(variables["staleness"]) <= 1


@pytest.mark.slow
def test_adapter_run_resumes_and_exports(play: Play):
    variables = play("107")
    assert variables["steps"] == list(range(1, 21))
    assert rises(variables["rewards"], 1.5)
    assert "adapter_model.safetensors" in variables["exported"]


# ---- why did this run stop learning?

RUNS = ("healthy", "a", "b", "c", "d")


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_dashboard_diagnoses_injected_causes_only(tutorials: Path):
    why = importlib.import_module("why_it_stopped")
    why.prepare(tutorials, "arithmetic", seed=0)
    skyrl_gym.register(id="rounded_sums", entry_point=why.RoundedSumsEnv)
    for name in RUNS:
        why.train(tutorials, name, why.STEPS)
    with TestClient(make_app(RunsFolder(tutorials / "runs"), Defaults()), base_url="http://localhost") as client:
        views = {name: RunView(client, name, why.STEPS) for name in RUNS}
        assert_diagnostics(views)
        assert_causes(views)


class RunView:
    """Answers of the dashboard's server about one run."""

    def __init__(self, client: TestClient, run: str, last_step: int):
        self._client, self._run, self._last = client, run, last_step

    def ask(self, question: str, **query: Any) -> Any:
        answer = self._client.get(f"/api/{question}", params={"run": self._run, **query})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def end(self, name: str) -> float:
        """Mean of the last three values of a curve."""
        return fmean(self.ask("curves", name=name)["curves"][name][1][-3:])

    def rows(self, step: int | None = None) -> list[dict[str, Any]]:
        return self.ask("step", phase="train", step=step or self._last)["rows"]

    def sample(self, line: int) -> dict[str, Any]:
        return self.ask("sample", phase="train", step=self._last, line=line)

    def columns(self, line: int) -> dict[str, Any]:
        return self.ask("columns", phase="train", step=self._last, line=line)["columns"]


def assert_diagnostics(views: dict[str, RunView]) -> None:
    """Each run has the diagnostic of its cause, the healthy one has none."""
    found = {name: {each["name"] for each in view.ask("run")["diagnostics"]} for name, view in views.items()}
    assert found["healthy"] == set()
    expected = {"a": "evaluation-gap", "b": "entropy-collapse", "c": "truncation", "d": "stale-weights"}
    assert all(name in found[run] for run, name in expected.items()), found


def assert_causes(views: dict[str, RunView]) -> None:
    """Curves, steps and tokens show the causes as docs/why-it-stopped-learning.md says."""
    reward, score = "reward/avg_raw_reward", "eval/all/avg_score"
    assert views["healthy"].end(reward) > 0.7 and views["healthy"].end(score) > 0.9
    # a: rewarded answers of the last step are wrong, and shorter than those of the healthy run
    assert views["a"].end("reward/avg_pass_at_8") > 0.9 and views["a"].end(score) < 0.2
    wrong = [row for row in map(views["a"].sample, range(16)) if row["reward"] > 0 and not is_right(row)]
    assert len(wrong) > 8
    assert views["a"].end("generate/avg_num_tokens") < 0.6 * views["healthy"].end("generate/avg_num_tokens")
    # b: the samples of a prompt are alike, and no token has entropy
    groups = {(row["uid"], row["reward"]) for row in views["b"].rows()}
    assert len(groups) < 1.25 * len({uid for uid, _ in groups})
    assert views["b"].end(reward) < 0.2
    assert max(entropy for entropy in views["b"].columns(0)["entropies"] if entropy is not None) < 0.1
    # c: most answers are cut off at the limit, and those are rarely rewarded
    cut, whole = ([row for row in views["c"].rows() if row["stop"] == stop] for stop in ("length", "stop"))
    assert {row["tokens"] for row in cut} == {16}
    assert len(cut) > len(whole)
    assert fmean(row["reward"] for row in cut) < 0.3 < fmean(row["reward"] for row in whole)
    assert views["c"].end(score) < 0.7
    # d: all tokens are of version 0, and the trainer's log-probs are not the engine's
    assert {tuple(row["versions"]) for row in views["d"].rows()} == {(0, 0)}
    assert views["d"].end(reward) < 0.5 and views["d"].end(score) < 0.3
    gap = "policy/rollout_train_logprobs_abs_diff_mean"
    assert views["d"].end(gap) > 0.05 > 1e-3 > views["healthy"].end(gap)


def is_right(row: dict[str, Any]) -> bool:
    """Check that the answer is the sum in the prompt."""
    left, right = map(int, row["prompt"].partition("user\n")[2].partition("<")[0].split("+"))
    return f"<answer>{left + right}</answer>" in row["response"]
