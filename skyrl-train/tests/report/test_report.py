import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.report import save_learning_curve_png, write_report
from skyrl_train.report.charts import groups, overview, timing_stages
from skyrl_train.report.collect import curves, read_trajectories, run_times, spread
from skyrl_train.report.swim_lanes import swim_lanes
from skyrl_train.rollouts.timeline import Timeline
from skyrl_train.utils.run_folder import RunFolder

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'><!--"


def row(sample: int, *, text: str = "46", num_tokens: int = 1, failed: bool = False) -> dict[str, Any]:
    return {
        "uid": f"prompt {HOSTILE}",
        "sample": sample,
        "prompt": f"12+34={HOSTILE}",
        "response": text * num_tokens,
        "reward": 0.0 if failed else 1.0,
        "stop_reason": "stop",
        "failure": {"kind": "tool", "message": HOSTILE} if failed else None,
        "prompt_ids": [1],
        "tokens": {
            "text": [text] * num_tokens,
            "ids": list(range(num_tokens)),
            "loss_mask": [0 if failed else 1] * num_tokens,
            "log_probs": [-0.5] * num_tokens,
            "rewards": [1.0] * num_tokens,
            "weight_versions": None,
        },
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.write_config(f"trainer:\n  run_name: adding\n  seed: 7\n# {HOSTILE}\n")
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward/avg_raw_reward": step / 10, f"mine/{HOSTILE}": 1.0, "timing/step": 2.0})
        run.write_trajectories(step, "train", [row(0, text=HOSTILE), row(1), row(2, failed=True)])
    return run


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_curves_settings_and_samples(run: RunFolder):
    path = write_report(run.path)
    assert path == run.report_path
    data = embedded(path.read_text())
    assert (data["name"], data["steps"], data["summary"]) == ("adding", 3, [["Seed", "7"]])
    assert data["curves"]["reward/avg_raw_reward"] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    assert [(sample["step"], sample["sample"]) for sample in data["samples"]][:3] == [(1, 0), (1, 1), (1, 2)]
    assert data["samples"][0]["text"] == [HOSTILE]


def test_hostile_text_is_nowhere_in_the_page_as_markup(run: RunFolder):
    page = write_report(run.path).read_text()
    assert "<script>document.title" not in page
    assert "<img src=x" not in page


def test_the_page_needs_no_network_and_runs_only_its_own_scripts(run: RunFolder):
    page = write_report(run.path).read_text()
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="', page.split('id="data"')[0])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none';")
    scripts = re.findall(r"<script>(.*?)</script>\n", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert [f"'sha256-{value}'" in policy[1] for value in hashes] == [True, True]


def test_samples_are_bounded_and_spread_over_the_run(tmp_path: Path):
    run = RunFolder(tmp_path)
    for step in range(1, 101):
        run.write_trajectories(step, "train", [row(sample) for sample in range(8)])
    found = read_trajectories(run, max_samples=10)
    assert len(found.samples) == 10
    steps = [sample["step"] for sample in found.samples]
    assert (steps[0], steps[-1], len(set(steps))) == (1, 100, 10)
    assert (found.num_files_read, found.num_files) == (10, 100)
    assert read_trajectories(run, max_samples=0).samples == []


def test_a_failure_is_counted_and_among_the_samples(run: RunFolder):
    run.write_trajectories(4, "train", [row(0), row(1, failed=True), row(2), row(3)])
    found = read_trajectories(run, max_samples=4)  # one a file
    assert found.failure_counts == {"tool": 4}
    assert [failure["step"] for failure in found.failures] == [1, 2, 3, 4]
    assert all(sample["failure"] for sample in found.samples)


def test_a_very_long_response_loses_its_middle(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.write_trajectories(1, "eval", [row(0, num_tokens=10_000)])
    [sample] = read_trajectories(run, max_samples=1).samples
    assert (sample["num_tokens"], sample["gap"]) == (10_000, {"at": 3000, "tokens": 6000})
    assert sample["ids"][2999:3001] == [2999, 9000]
    assert {len(sample[name]) for name in ("text", "ids", "mask", "log_probs", "rewards")} == {4000}


def test_last_line_of_a_step_with_a_metric_counts():
    rows = [{"step": 2, "time": 5.0, "a": 1.0}, {"step": 1, "time": 6.0, "a": 3.0}, {"step": 2, "time": 7.0, "b": None}]
    assert curves([*rows, {"step": 2, "time": 8.0, "a": 2, "phase": "train"}]) == {
        "a": ([1, 2], [3.0, 2.0]),
        "b": ([2], [None]),
    }


def test_a_run_started_when_its_first_step_began():
    rows = [{"step": 1, "time": 110.0, "timing/step": 10.0}, {"step": 2, "time": 130.0}]
    assert run_times(rows) == {"started": 100.0, "updated": 130.0, "seconds": 30.0}


def test_every_metric_is_in_a_group():
    names = ["policy/grad_norm", "eval/gsm8k/avg_score", "eval/all/avg_score", "plain", "policy/loss_metrics/x"]
    found = groups(names)
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    assert list(found) == ["eval/all", "eval/gsm8k", "other", "policy"]


def test_the_overview_shows_what_there_is():
    charts = overview(["reward/avg_raw_reward", "reward/avg_pass_at_8", "generate/avg_num_tokens", "mine/x"])
    assert [(chart["title"], chart["metrics"]) for chart in charts] == [
        ("Reward", {"reward/avg_raw_reward": "training"}),
        ("Pass rate", {"reward/avg_pass_at_8": "avg_pass_at_8"}),
        ("Response length", {"generate/avg_num_tokens": "avg_num_tokens"}),
    ]
    assert charts[2]["band"] is None  # neither the shortest nor the longest is known


def test_stages_within_a_stage_are_not_counted_twice():
    names = ["step", "generate", "generate/env", "train_critic_and_policy", "policy_train", "eval"]
    assert timing_stages([f"timing/{name}" for name in names]) == [
        "timing/eval",
        "timing/generate",
        "timing/train_critic_and_policy",
    ]


def test_stages_of_asynchronous_training_are_not_counted_twice():
    assert timing_stages(["timing/step", "timing/run_training", "timing/policy_train", "timing/eval"]) == [
        "timing/eval",
        "timing/run_training",
    ]


def test_swim_lanes_show_who_ran_when_and_whom_the_trainer_waited_for(run: RunFolder):
    now = 100.0
    timeline = Timeline(lambda: now)
    timeline.group_started(0, 0)
    timeline.group_started(1, 0)
    with timeline.waiting("waits for group 1"), timeline.phase("wait_for_generation_buffer"):
        now = 102.0
        timeline.group_ended(1, "finished")
    timeline.group_started(2, 0)
    with timeline.phase("run_training"), timeline.phase("policy_train"):
        now = 105.0
    run.append_timeline(1, timeline.take([1]))
    timeline.group_ended(0, "failed")
    now = 106.0
    timeline.group_ended(2, "finished")
    timeline.group_started(3, 1)
    now = 107.0
    run.append_timeline(2, timeline.take([2]))
    first, second = embedded(write_report(run.path).read_text())["lanes"]
    assert (first["step"], first["seconds"], first["num_slots"]) == (1, 5.0, 2)
    assert first["phases"] == [["waits for groups", 0.0, 2.0], ["trains", 2.0, 5.0]]
    assert first["waits"] == [[0.0, 2.0, "waits for group 1"]]
    names = ("ticket", "slot", "start", "end", "outcome", "trained")
    assert [[group[name] for name in names] for group in first["groups"]] == [
        [1, 1, 0.0, 2.0, "finished", 1],
        [0, 0, 0.0, 5.0, "failed", None],
        [2, 1, 2.0, 6.0, "finished", 2],
    ]
    assert [[group[name] for name in names] for group in second["groups"]] == [
        [2, 1, -3.0, 1.0, "finished", 2],
        [3, 0, 1.0, None, "running", None],
    ]


def test_lanes_of_a_long_run_are_bounded():
    rows = [
        {"step": i, "began": i, "ended": i + 1, "trained": [], "running": [], "waits": [], "phases": []}
        | {"groups": [[100 * i + slot, slot, i, i + 1, i, "finished"] for slot in range(100)]}
        for i in range(100)
    ]
    found = swim_lanes(rows, spread)
    assert len(found) == 24 and (found[0].step, found[-1].step) == (0, 99)
    assert {lanes.num_slots for lanes in found} == {100} and {len(lanes.groups) for lanes in found} == {64}
    assert swim_lanes([], spread) == []


def test_a_run_that_has_only_started_or_kept_no_trajectories_has_a_page(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    run.write_config("not: [valid")
    assert embedded(write_report(run.path).read_text())["curves"] == {}
    run.append_metrics(1, {"loss": float("nan")})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 2')  # being written now
    data = embedded(write_report(run.path, tmp_path / "page.html").read_text())
    assert (data["curves"], data["samples"]) == ({"loss": [[1], [None]]}, [])


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path)
    with pytest.raises(DataError, match="is not a run folder"):
        save_learning_curve_png(tmp_path / "absent", tmp_path / "curve.png")


def test_the_learning_curve_is_a_png(run: RunFolder, tmp_path: Path):
    path = save_learning_curve_png(run.path, tmp_path / "curve.png", title="adding")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(DataError, match="neither loss nor eval/all/avg_score"):
        save_learning_curve_png(run.path, tmp_path / "none.png", training_metric="loss")


@pytest.mark.slow
def test_the_command_writes_a_page_and_tells_where(run: RunFolder, tmp_path: Path):
    command = [sys.executable, "-W", "error", "-m", "skyrl_train.report"]
    made = subprocess.run(
        [*command, run.path, "--output", tmp_path / "page.html", "--max-samples", "2"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (made.returncode, made.stdout) == (0, f"{tmp_path / 'page.html'}\n")
    assert len(embedded((tmp_path / "page.html").read_text())["samples"]) == 2
    refused = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "is not a run folder" in refused.stderr


@pytest.mark.slow
def test_a_browser_draws_the_page_and_hostile_text_stays_text(run: RunFolder, tmp_path: Path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("needs chromium")
    run.append_timeline(1, Timeline().take([]))
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'profile'}"]
    drawn = subprocess.run(
        [browser, *options, "--virtual-time-budget=5000", "--dump-dom", write_report(run.path).as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert "<title>adding · training run</title>" in drawn
    assert drawn.count('class="main-svg"') >= 2
    assert ">What ran when<" in drawn
    body = drawn.split("</header>")[1].split('<script type="application/json"')[0]
    assert '<span class="token" data-index="0"' in body
    assert "&lt;img src=x" in body
    assert "<img" not in body
