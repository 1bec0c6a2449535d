"""Grouping of curves into charts, and lanes of what ran when."""

from pathlib import Path
from typing import Any

from skyrl_inspect.dashboard.charts import build_overview, group_metrics, list_timing_stages
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.time_line import Timelines, build_trace_events
from skyrl_train.rollouts.timeline import Timeline
from skyrl_train.utils.io import write_atomically
from skyrl_train.utils.run_folder import RunFolder


def test_metrics_all_have_chart_group():
    names = ["policy/grad_norm", "eval/gsm8k/avg_score", "eval/all/avg_score", "plain", "policy/loss_metrics/x"]
    found = group_metrics(names)
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    assert list(found) == ["eval/all", "eval/gsm8k", "other", "policy"]


def test_overview_shows_available_metrics():
    charts = build_overview(["reward/avg_raw_reward", "reward/avg_pass_at_8", "generate/avg_num_tokens", "mine/x"])
    assert [(chart["title"], chart["metrics"]) for chart in charts] == [
        ("Reward", {"reward/avg_raw_reward": "training"}),
        ("Pass rate", {"reward/avg_pass_at_8": "avg_pass_at_8"}),
        ("Response length", {"generate/avg_num_tokens": "avg_num_tokens"}),
    ]
    assert charts[2]["band"] is None  # neither the shortest nor the longest is known


def test_nested_stages_are_counted_once():
    names = ["step", "generate", "generate/env", "train_critic_and_policy", "policy_train", "eval"]
    assert list_timing_stages([f"timing/{name}" for name in names]) == [
        "timing/eval",
        "timing/generate",
        "timing/train_critic_and_policy",
    ]
    assert list_timing_stages(["timing/step", "timing/run_training", "timing/policy_train", "timing/eval"]) == [
        "timing/eval",
        "timing/run_training",
    ]


def lanes(folder: Path, step: int | None = None) -> Any:
    return Timelines(RunsFolder(folder)).lanes(".", step)["lanes"]


def test_lanes_show_groups_phases_and_waits(tmp_path: Path):
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
    run = RunFolder(tmp_path)
    run.append_timeline(1, timeline.take([1]))
    timeline.group_ended(0, "failed")
    now = 106.0
    timeline.group_ended(2, "finished")
    timeline.group_started(3, 1)
    now = 107.0
    run.append_timeline(2, timeline.take([2]))
    first, second = lanes(tmp_path, 1), lanes(tmp_path)
    assert (first["step"], first["seconds"], first["num_slots"], first["unit"]) == (1, 5.0, 2, "group")
    assert first["phases"] == [("waits for groups", 0.0, 2.0), ("trains", 2.0, 5.0)]
    assert first["workers"] == [("policy", "updates", 2.0, 5.0)]
    assert first["waits"] == [(0.0, 2.0, "waits for group 1")]
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


def test_synchronous_samples_take_lowest_free_slot():
    timeline = Timeline(lambda: 100.0)
    spans = [("d", 3.0, 4.0), ("a", 0.0, 2.0), ("b", 1.0, 5.0), ("c", 2.0, 3.0), ("e", 3.5, 6.0)]
    names = timeline.record_samples([(name, start, end, 7, "finished") for name, start, end in spans])
    assert names == ["a", "b", "c", "d", "e"]
    record = timeline.take(names, "sample")
    assert [(group[0], group[1]) for group in record["groups"]] == [("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 2)]


def test_lanes_are_bounded_and_follow_growing_or_replaced_file(tmp_path: Path):
    run = RunFolder(tmp_path)

    def record(step: int) -> dict[str, Any]:
        groups = [[f"{step}:{slot}", slot, step, step + 1, step, "finished"] for slot in range(100)]
        return {"began": step, "ended": step + 1, "unit": "sample", "trained": [group[0] for group in groups]} | {
            "groups": groups, "running": [], "waits": [], "phases": [["generate", step, step + 1]]}  # fmt: skip

    timelines = Timelines(RunsFolder(tmp_path))
    assert timelines.lanes(".", None) == {"steps": [], "lanes": None}
    for step in range(1, 51):
        run.append_timeline(step, record(step))
    found = timelines.lanes(".", 20)
    assert (found["steps"][-1], found["lanes"]["num_slots"], len(found["lanes"]["groups"])) == (50, 100, 64)
    assert {group["trained"] for group in found["lanes"]["groups"]} == {20}
    with open(run.timeline_path, "ab") as file:
        file.write(b'not JSON\n{"step": 51}\n{"torn')
    run.append_timeline(52, record(52))
    assert timelines.lanes(".", None)["lanes"]["step"] == 52
    trace = build_trace_events(timelines.read_last_records("."), ([1, 52], [2.0, 53.0]), ([1, 52], [1.0, 1.0]))
    assert sum(event["name"] == "generate" for event in trace) == 51
    lines = run.timeline_path.read_bytes().splitlines(keepends=True)
    write_atomically(run.timeline_path, b"".join(lines[:10]))
    assert timelines.lanes(".", 30)["steps"] == list(range(1, 11))
