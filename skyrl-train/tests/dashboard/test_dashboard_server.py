import html
import json
import os
import socket
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_runs import HOSTILE, make_old, trajectory, write_run
from starlette.testclient import TestClient

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.waits import HEADER_BYTES, start_ticks
from skyrl_inspect.dashboard.__main__ import main, read_token
from skyrl_inspect.dashboard.agent_files import to_row
from skyrl_inspect.dashboard.catalog import log_facts
from skyrl_inspect.dashboard.json_lines import sample_rows
from skyrl_inspect.dashboard.live import iter_change_events
from skyrl_inspect.dashboard.renderers import FRAME_POLICY
from skyrl_inspect.dashboard.runs_folder import NotBelowError, RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.defaults import Defaults
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollouts.timeline import Timeline
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.token_columns import encode_columns
from skyrl_train_testing.tiny_runs import register_environments

DEFAULTS = Defaults(
    {
        "trainer.seed": 42,
        "trainer.algorithm.use_kl_loss": True,
        "trainer.policy.model.path": "tiny",
        "trainer.policy.optimizer_config.lr": 1e-6,
    }
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "adding")
    return folder


@pytest.fixture
def client(runs: Path) -> Iterator[TestClient]:
    with TestClient(make_app(RunsFolder(runs), DEFAULTS), base_url="http://localhost") as client:
        yield client


def ask(client: TestClient, question: str, **query: Any) -> Any:
    answer = client.get(f"/api/{question}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- the list of runs


def test_list_names_state_progress_curve_and_changed_settings(client: TestClient):
    [run] = ask(client, "runs")["runs"]
    assert (run["run"], run["name"], run["state"], run["step"], run["total"]) == ("adding", "adding", "finished", 3, 3)
    assert (run["metric"], run["curve"]) == ("reward/avg_raw_reward", [[1, 2, 3], [0.1, 0.2, 0.3]])
    assert run["changed"] == {"environment.env_class": "gsm8k", "trainer.run_name": "adding", "trainer.seed": 7}


def test_run_has_command_of_last_start(runs: Path, client: TestClient):
    assert ask(client, "run", run="adding")["command"] is None
    run = RunFolder(runs / "adding")
    run.append_start(0, {"command": "python first.py"})  # of a release that did not record the folder
    assert ask(client, "run", run="adding")["command"] is None
    run.append_start(2, {"command": "python again.py 'trainer.tags=[a b]'", "folder": "/data/my runs"})
    command = "cd '/data/my runs' && python again.py 'trainer.tags=[a b]'"
    assert ask(client, "run", run="adding")["command"] == command


@pytest.mark.parametrize(
    "num_steps, age, last_record, state, message",
    [
        (2, 0, "", "running", None),
        (2, 3600, "", "silent", None),  # killed with -9: it said nothing
        (3, 3600, "", "finished", None),
        (2, 0, "ERROR   ConfigError: no such model", "failed", "ConfigError: no such model"),
        (
            2,
            3600,
            "WARNING stop requested; the same command resumes",
            "stopped",
            "stop requested; the same command resumes",
        ),
        (2, 0, "WARNING the checkpoint was late", "running", None),
        (0, 0, "INFO    this run is finished: ckpts/global_step_3", "finished", None),
    ],
)
def test_run_state_is_derived_from_files(tmp_path: Path, num_steps, age, last_record, state, message):
    make_old(write_run(tmp_path / "run", num_steps, last_record=last_record), age)
    client = TestClient(make_app(RunsFolder(tmp_path), DEFAULTS), base_url="http://localhost")
    run = ask(client, "run", run="run")
    assert (run["state"], run["message"]) == (state, message)


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_killed_run_does_not_count_as_running(tmp_path: Path, host: str):
    """Its driver's record is left, of a process that is gone; those of another machine cannot be asked about."""
    run = write_run(tmp_path / "run", 2)
    here = socket.gethostname()
    states = []
    for start in (start_ticks(os.getpid()), 1):  # this process, and one that had its number before
        facts = {"role": "trainer", "pid": os.getpid(), "host": here if host == "here" else "other", "start": start}
        (run.path / "waits").mkdir(exist_ok=True)
        (run.path / "waits" / "trainer-1.waits").write_bytes(json.dumps(facts).encode().ljust(HEADER_BYTES))
        app = make_app(RunsFolder(tmp_path), DEFAULTS)
        states.append(ask(TestClient(app, base_url="http://localhost"), "run", run="run")["state"])
    assert states == ["running", "silent" if host == "here" else "running"]


def test_restarted_run_is_not_failed():
    log = (
        "2026-01-01 00:00:00 ERROR   OSError: full\n2026-01-01 00:01:00 INFO    step plan\nthe run: 9 training steps\n"
    )
    assert log_facts(log) == {"step": None, "total": 9, "outcome": None, "message": None}


def test_folder_may_be_run_or_contain_nested_runs(tmp_path: Path):
    write_run(tmp_path / "a" / "b" / "deep")
    app = make_app(RunsFolder(tmp_path), DEFAULTS)
    assert [run["run"] for run in ask(TestClient(app, base_url="http://localhost"), "runs")["runs"]] == ["a/b/deep"]
    app = make_app(RunsFolder(tmp_path / "a" / "b" / "deep"), DEFAULTS)
    assert [run["run"] for run in ask(TestClient(app, base_url="http://localhost"), "runs")["runs"]] == ["."]


def test_sparkline_reads_few_lines_of_long_file():
    lines = [json.dumps({"step": step, "filler": "x" * 500}).encode() + b"\n" for step in range(5000)]
    steps = [row["step"] for row in sample_rows(BytesIO(b"".join(lines)), len(b"".join(lines)), 60)]
    assert (steps[0], steps[-1], len(steps)) == (0, 4999, 61)
    assert steps == sorted(steps)
    few = b"".join(lines[:3])
    assert [row["step"] for row in sample_rows(BytesIO(few + b'{"st'), len(few) + 4, 60)] == [0, 1, 2]


# ---- files that grow, are replaced, or are damaged


def test_curves_follow_appended_and_replaced_file(client: TestClient, runs: Path):
    query = {"run": "adding", "name": ["policy/x", "absent"]}
    assert ask(client, "curves", **query)["curves"] == {"policy/x": [[1, 2, 3], [1.0, 2.0, 3.0]], "absent": [[], []]}
    run = RunFolder(runs / "adding")
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"step": 4, "time": 1.0, "policy/x": 4')  # being written now
    assert ask(client, "curves", **query)["curves"]["policy/x"][0] == [1, 2, 3]
    with open(run.metrics_path, "ab") as file:
        file.write(b'.5}\n{"step": 5, "time": 2.0, "policy/x": null}\nnot JSON\n{"step": "x"}\n\xff\n')
    assert ask(client, "curves", **query)["curves"]["policy/x"] == [[1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.5, None]]
    run.metrics_path.write_text('{"step": 1, "time": 1.0, "policy/x": 9.0}\n')
    assert ask(client, "curves", **query)["curves"]["policy/x"] == [[1], [9.0]]


def test_resumed_run_shows_steps_before_checkpoint(client: TestClient, runs: Path):
    assert ask(client, "curves", run="adding", name="policy/x")["curves"]["policy/x"][0] == [1, 2, 3]
    RunFolder(runs / "adding").delete_after(1)
    assert ask(client, "curves", run="adding", name="policy/x")["curves"]["policy/x"][0] == [1]
    assert ask(client, "run", run="adding")["steps"] == {"train": [1], "eval": []}


def test_metrics_come_in_groups_and_as_charts(client: TestClient):
    found = ask(client, "metrics", run="adding")
    assert found["names"] == ["policy/x", "reward/avg_raw_reward", "timing/step"]
    assert found["overview"][0]["title"] == "Reward"
    assert list(found["groups"]) == ["policy", "reward", "timing"]


def test_sample_has_training_columns_of_tokens(client: TestClient, runs: Path):
    assert ask(client, "columns", run="adding", step=2, line=0) == {}  # an earlier release, or a step under way
    columns = encode_columns({"trainer_log_probs": np.array([-0.5, np.nan]), "trained": np.array([1, 0])})
    run = RunFolder(runs / "adding")
    run.write_token_columns(2, [{"uid": "0", **columns}, {"uid": "0", "advantages": "no base64!"}])
    found = ask(client, "columns", run="adding", step=2, line=0)
    assert found == {"uid": "0", "columns": {"trainer_log_probs": [-0.5, None], "trained": [1, 0]}}
    assert ask(client, "columns", run="adding", step=2, line=1) == {"uid": "0", "columns": {}}
    assert ask(client, "columns", run="adding", step=2, line=2) == {}
    assert ask(client, "columns", run="adding", phase="eval", step=2, line=0) == {}
    assert ask(client, "run", run="adding")["steps"]["train"] == [1, 2, 3]
    run.delete_after(1)
    assert not run.token_columns_path(2).exists()


def test_step_summarizes_trajectories(client: TestClient):
    rows = ask(client, "step", run="adding", phase="train", step=2)["rows"]
    assert [(row["uid"], row["sample"], row["reward"], row["tokens"]) for row in rows] == [
        ("0", 0, 1.0, 2),
        ("0", 1, 1.0, 2),
        ("1", 0, 0.0, 2),
        ("1", 1, 1.0, 2),
    ]
    assert [row["failure"] and row["failure"]["kind"] for row in rows] == [None, None, None, "tool"]
    assert (rows[0]["log_prob"], rows[0]["versions"], rows[0]["prompt_tokens"]) == (-1.0, [0, 1], 3)


def test_compressed_steps_are_shown_like_others(client: TestClient, runs: Path):
    plain = RunFolder(runs / "adding")
    compressed = RunFolder(runs / "compressed", compress=True)
    rows = plain.read_trajectories(2, "train")
    compressed.write_trajectories(2, "train", rows)
    compressed.write_token_columns(2, [{"uid": row["uid"]} for row in rows])
    both = [ask(client, "step", run=run, phase="train", step=2) for run in ("adding", "compressed")]
    assert both[0] == both[1] and both[1]["torn_bytes"] == 0
    for _ in range(2):  # the second time with known offsets
        assert ask(client, "sample", run="compressed", phase="train", step=2, line=3) == rows[3]
    assert ask(client, "columns", run="compressed", step=2, line=1) == {"uid": rows[1]["uid"], "columns": {}}
    assert ask(client, "run", run="compressed")["steps"]["train"] == [2]
    compressed.write_trajectories(3, "train", [*rows, trajectory(tokens=[f"{n}" for n in range(100_000)])])
    path = compressed.trajectories_path(3, "train")
    path.write_bytes(path.read_bytes()[:-20])
    for _ in range(2):  # no beginning is shown as the whole the second time
        assert client.get("/api/step?run=compressed&phase=train&step=3").status_code == 404


def test_sample_equals_line_of_file(client: TestClient):
    assert ask(client, "sample", run="adding", phase="train", step=2, line=3) == trajectory("1", 1, failed=True)


def test_invalid_lines_are_counted_and_not_fatal(client: TestClient, runs: Path):
    path = RunFolder(runs / "adding").trajectories_path(2, "train")
    good = path.read_bytes().splitlines(keepends=True)[0]
    strange = b'{"uid": ["a"], "reward": "b", "tokens": {"ids": 3, "log_probs": [null, "c"]}, "failure": 1}\n'
    path.write_bytes(
        good + b"\xff\xfe not JSON\n" + strange + b'{"uid": "\xff\xfe"}\n' + b"[" * 200_000 + b"\n" + good[:50]
    )
    found = ask(client, "step", run="adding", phase="train", step=2)
    assert [row.get("is_broken", False) for row in found["rows"]] == [False, True, False, False, True]
    assert (found["num_rows"], found["torn_bytes"]) == (5, 50)
    assert client.get("/api/sample?run=adding&step=2&line=1").content == b"\xff\xfe not JSON"
    assert client.get("/api/sample?run=adding&step=2&line=5").status_code == 404  # the torn one


def test_sample_of_ten_megabytes_is_sent_and_summarized(client: TestClient, runs: Path):
    RunFolder(runs / "adding").write_trajectories(9, "train", [trajectory(tokens=["x" * 10_000_000, HOSTILE])])
    [row] = ask(client, "step", run="adding", step=9)["rows"]
    assert (len(row["preview"]), row["bytes"] > 10_000_000) == (160, True)
    assert len(ask(client, "sample", run="adding", step=9, line=0)["tokens"]["text"][0]) == 10_000_000


def test_settings_show_changes_from_defaults(client: TestClient, runs: Path):
    found = ask(client, "settings", run="adding")
    assert ["trainer.seed", 7, 42] in found["changes"]
    assert found["values"]["trainer.policy.model.path"] == "tiny"
    (runs / "adding" / "config.yaml").write_text("a: [&x 1, *y\n")
    assert ask(client, "settings", run="adding") == {"text": "a: [&x 1, *y\n", "values": {}, "changes": []}


def test_log_shows_tail_position_and_search_results(client: TestClient, runs: Path):
    path = runs / "adding" / "logs" / "engine.log"
    path.write_bytes(b"".join(b"line %06d \x1b[31m\xff\n" % number for number in range(20_000)))
    assert [name for name, _ in ask(client, "logs", run="adding")["logs"]] == ["engine.log", "trainer.log"]
    hangs = runs / "adding" / "explanations"
    hangs.mkdir()
    for name in ("2026-11-24_22-16-15.txt", "2026-11-24_22-16-15.json"):
        (hangs / name).write_text("1. engine 0 is stopped")
    shown = "explanations/2026-11-24_22-16-15.txt"
    assert [name for name, _ in ask(client, "logs", run="adding")["logs"]] == ["engine.log", "trainer.log", shown]
    assert ask(client, "log", run="adding", name=shown)["text"] == "1. engine 0 is stopped"
    assert client.get("/api/log", params={"run": "adding", "name": "explanations/../metrics.jsonl"}).status_code == 404
    end = ask(client, "log", run="adding", name="engine.log")
    assert (end["start"] > 0, end["text"].splitlines()[-1][:11]) == (True, "line 019999")
    [[offset, text]] = ask(client, "log", run="adding", name="engine.log", query="LINE 000777")["hits"]
    assert (offset, text[:11]) == (777 * 19, "line 000777")
    around = ask(client, "log", run="adding", name="engine.log", offset=offset)
    assert "line 000777" in around["text"]


def test_lanes_and_trace_show_groups_phases_and_waits(client: TestClient, runs: Path):
    assert ask(client, "lanes", run="adding") == {"steps": [], "lanes": None}
    now = 100.0
    timeline = Timeline(lambda: now)
    timeline.group_started(7, 0)
    with timeline.waiting("waits for group 7"), timeline.phase("wait_for_generation_buffer"):
        now = 102.0
        timeline.group_ended(7, "finished")
    RunFolder(runs / "adding").append_timeline(1, timeline.take([7]))
    found = ask(client, "lanes", run="adding", step=1)
    assert (found["steps"], found["lanes"]["phases"]) == ([1], [["waits for groups", 0.0, 2.0]])
    assert found["lanes"]["groups"][0]["trained"] == 1
    trace = ask(client, "perfetto", run="adding")["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    spans = {(names[event["tid"]], event["name"]): event["dur"] for event in trace if event["ph"] == "X"}
    assert spans[("slot 000", "group 7")] == spans[("trainer", "wait_for_generation_buffer")] == 2_000_000
    assert spans[("steps", "step 1")] == 2_000_000


def test_agent_trajectories_are_shown_as_evaluation_run(client: TestClient, runs: Path):
    record = {
        "instance_id": "bug-7", "trajectory_id": 1, "reward": 1.0, "finish_reason": "FINISH_TOOL", "failure": None,
        "tool_calls": [{"step": 1, "name": "bash", "arguments": {"command": "ls"}, "ok": True, "seconds": 0.2}],
        "sandbox": [{"stage": "evaluate", "command": "make test", "stdout": "2 passed", "returncode": 0}],
        "rows": [{"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "mask": [1, 1, 0], "log_probs": None,
                  "prompt": "fix it", "spans": [[True, "ls"], [False, "a.py"]]},
                 {"prompt_ids": [1, 2, 3], "response_ids": [9]}, {"prompt_ids": [8], "response_ids": [9]}],
        "messages": [{"role": "user", "content": "fix it"}], "reward_parts": {"tests": 1.0},
        "time": 100.0, "stage_seconds": {"queue_generate": 2.0, "generate": 5.0, "evaluate": 1.0},
    }  # fmt: skip
    (runs / "agents").mkdir()
    (runs / "agents" / "trajectories.jsonl").write_text(json.dumps(record) + "\n" + '{"instance_id": 3}\n{"torn')
    run = next(run for run in ask(client, "runs")["runs"] if run["run"] == "agents")
    assert run["state"] == "running"
    assert ask(client, "run", run="agents")["steps"] == {"train": [], "eval": [0]}
    rows = ask(client, "step", run="agents", phase="eval", step=0)["rows"]
    assert [(row["uid"], row["sample"], row["tokens"], row["stop"]) for row in rows] == [
        ("bug-7", 1, 5, "FINISH_TOOL"),
        ("3", None, 0, None),
    ]
    row = ask(client, "sample", run="agents", phase="eval", step=0, line=0)
    assert row["tokens"] == {"text": ["ls", "a.py"], "loss_mask": [1, 0]}
    assert row["tool_calls"][0]["name"] == "bash"
    assert row["sandbox"][0]["stdout"] == "2 passed"
    assert row["branches"] == [[None, 0], [0, 3], [None, 0]]
    assert "branches" not in to_row(record), "a table of many trajectories needs none: they are compared token by token"
    assert row["is_replayable"] is False
    assert (row["messages"], row["reward_parts"]) == (record["messages"], {"tests": 1.0})
    assert row["stages"] == [["queue_generate", 92.0, 94.0], ["generate", 94.0, 99.0], ["evaluate", 99.0, 100.0]]
    assert (rows[0]["stages"], rows[1]["stages"]) == (row["stages"], [])


# ---- what environments show


class Shown(BaseTextEnv):
    """Environment that shows its trajectories."""

    @staticmethod
    def render_html(row: Any) -> str | None:
        if row["uid"] == "1":
            raise KeyError(f"no board of {HOSTILE}")
        return f"<b>board of {html.escape(row['uid'])}</b><script>document.title='taken'</script>"


@pytest.fixture
def shown_environment() -> Iterator[None]:
    with register_environments(shown=Shown):
        yield


def test_environment_page_has_no_scripts(client: TestClient, runs: Path, shown_environment: None):
    rows = [trajectory("0"), trajectory("1"), trajectory("0")]
    for row, name in zip(rows, ("shown", "shown", "os:getcwd"), strict=True):
        row["env_class"] = name
    RunFolder(runs / "adding").write_trajectories(2, "train", rows)
    query = {"run": "adding", "step": 2}
    shown = client.get("/api/rendered", params={**query, "line": 0})
    assert "<b>board of 0</b>" in shown.text
    assert shown.headers["content-security-policy"] == FRAME_POLICY
    assert "script-src" not in FRAME_POLICY and FRAME_POLICY.endswith("sandbox")
    failed = client.get("/api/rendered", params={**query, "line": 1})
    assert "render_html of environment shown raised KeyError" in failed.text
    assert "<script>" not in failed.text and "<img" not in failed.text
    # A module is not imported because a file names it; gsm8k, of the settings, shows nothing of its own.
    assert client.get("/api/rendered", params={**query, "line": 2}).status_code == 204
    assert client.get("/api/rendered", params={"run": "adding", "step": 1, "line": 0}).status_code == 204


# ---- what the server refuses


@pytest.mark.parametrize(
    "run", ["../outside", "..", "/etc", "adding/../../outside", "linked", "a\0b", "adding/logs", ""]
)
def test_paths_outside_folder_are_refused(client: TestClient, runs: Path, run: str):
    write_run(runs.parent / "outside")
    (runs / "linked").symlink_to(runs.parent / "outside")
    for name in ("run", "step?step=1", "sample?step=1&line=0", "log?name=trainer.log"):
        path, _, rest = name.partition("?")
        answer = client.get(
            f"/api/{path}?{rest}", params={"run": run} | dict(part.split("=") for part in rest.split("&") if part)
        )
        assert answer.status_code == 404, (name, answer.text)
    assert [found["run"] for found in ask(client, "runs")["runs"]] == ["adding"]
    assert ask(client, "logs", run=run) == {"logs": []} if run != "adding/logs" else True


def test_links_and_pipes_in_run_are_refused(client: TestClient, runs: Path):
    secret = runs.parent / "secret.txt"
    secret.write_text("secret")
    logs = runs / "adding" / "logs"
    (logs / "linked.log").symlink_to(secret)
    os.mkfifo(logs / "pipe.log")
    assert [name for name, _ in ask(client, "logs", run="adding")["logs"]] == ["trainer.log"]
    for name in ("linked.log", "pipe.log", "../config.yaml", "../../../secret.txt"):
        assert client.get("/api/log", params={"run": "adding", "name": name}).status_code == 404
    (runs / "adding" / "config.yaml").unlink()
    (runs / "adding" / "config.yaml").symlink_to(secret)
    assert ask(client, "settings", run="adding")["text"] == ""


def test_folder_replaced_by_link_is_not_followed(runs: Path):
    folder = RunsFolder(runs)
    (runs.parent / "elsewhere").mkdir()
    (runs.parent / "elsewhere" / "config.yaml").write_text("a: 1")
    (runs / "adding").rename(runs / "moved")
    (runs / "adding").symlink_to(runs.parent / "elsewhere")
    with pytest.raises(NotBelowError), folder.open("adding/config.yaml"):
        pass


@pytest.mark.parametrize(
    "query", ["step?run=adding&step=-1", "step?run=adding&step=x", "step?step=1", "sample?run=adding&step=1"]
)
def test_queries_without_sense_are_refused(client: TestClient, query: str):
    assert client.get(f"/api/{query}").status_code == 400


def test_server_only_reads(client: TestClient, runs: Path):
    before = {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))}
    for name in ("runs", "run?run=adding", "metrics?run=adding", "step?run=adding&step=1", "settings?run=adding"):
        assert client.get(f"/api/{name}").status_code == 200
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.request(method, f"/api/{name}").status_code == 405
    assert {path: path.stat().st_mtime_ns for path in sorted(runs.rglob("*"))} == before


def test_responses_have_strict_content_policy(client: TestClient):
    page = client.get("/")
    for answer in (page, client.get("/api/runs"), client.get("/assets/app.js"), client.get("/assets/../server.py")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text
    assert 'style="' not in page.text
    assert client.get("/assets/../server.py").status_code == 404
    for name in (
        "app.js",
        "runs.js",
        "curves.js",
        "step.js",
        "sample.js",
        "dom.js",
        "style.css",
        "vendor/uPlot.iife.min.js",
    ):
        answer = client.get(f"/assets/{name}")
        assert answer.status_code == 200
        assert "http://" not in answer.text.replace("http://www.w3.org/", "")
        assert ".innerHTML" not in answer.text


def test_name_of_another_host_is_refused(runs: Path):
    app = make_app(RunsFolder(runs), DEFAULTS)
    assert TestClient(app, base_url="http://elsewhere.example").get("/api/runs").status_code == 400


def test_token_is_required_and_stored_in_cookie(runs: Path):
    app = make_app(RunsFolder(runs), DEFAULTS, token="a-long-enough-secret", hosts=["*"])
    client = TestClient(app, base_url="http://machine.example", follow_redirects=False)
    for path in ("/", "/api/runs", "/api/live", "/assets/app.js", "/?token=wrong", "/?token=%C3%A9"):
        assert client.get(path).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer a-long-enough-secret"}).status_code == 200
    entrance = client.get("/?token=a-long-enough-secret")
    assert (entrance.status_code, entrance.headers["location"]) == (303, "/")
    assert "HttpOnly" in entrance.headers["set-cookie"] and "SameSite=strict" in entrance.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200


def test_non_loopback_address_requires_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert [read_token(host, None) for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2")] == [None] * 4
    for host in ("0.0.0.0", "::", "192.168.1.2", "machine"):
        with pytest.raises(ConfigError, match="--token-file"):
            read_token(host, None)
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match="5 characters"):
        read_token("0.0.0.0", tmp_path / "token")
    assert main([str(tmp_path), "--host", "0.0.0.0"]) == 1
    assert "--token-file" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    with pytest.raises(DataError, match="is not a folder"):
        RunsFolder(tmp_path / "absent")


async def test_events_tell_of_changes_alone():
    values = iter(["a", "a", "b", "b", NotBelowError("gone"), "b"])

    def look() -> str:
        value = next(values)
        if isinstance(value, Exception):
            raise value
        return value

    events = iter_change_events(look, poll_seconds=0.001)
    kinds = [(await anext(events)).partition("\n")[0] for _ in range(4)]
    assert kinds == ["event: change"] * 4  # a, b, gone, b
    assert next(values, None) is None
