import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from skyrl_gym.envs.arithmetic.problems import make_problems
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.error import Error, InfraError
from skyrl_gym.eval import EvalSettings, Stopped, evaluate, pass_at_k
from skyrl_gym.eval.__main__ import main
from skyrl_gym.eval.endpoint import with_stop_string
from skyrl_gym.eval.records import EpisodeFile, EpisodeRecord
from skyrl_gym.eval.statistics import bootstrap, clopper_pearson, estimate
from skyrl_gym.eval.summary import table

from .chat_server import ChatServer, completion
from .scripted_server import unused_url

SIX_TIMES_SEVEN = {"prompt": "6*7", "reward_spec": {"ground_truth": "42"}}


def solve(problem: str, error: int = 0) -> str:
    left, right = map(int, problem.split("+"))
    return f"<answer>{left + right + error}</answer>"


def right(messages):
    return solve(messages[0]["content"])


class RightEveryOther:
    """Model that answers a problem correctly the 1st, 3rd, 5th ... time it is asked."""

    def __init__(self):
        self.asked = Counter()
        self._lock = threading.Lock()

    def __call__(self, messages):
        problem = messages[0]["content"]
        with self._lock:
            self.asked[problem] += 1
            return solve(problem, error=1 - self.asked[problem] % 2)


@pytest.fixture
def rows(tmp_path):
    """Six different sums."""
    problems = {row["extra_info"]["problem"]: row for row in make_problems(20, seed=1, instruction="")}
    return write(tmp_path / "rows.jsonl", list(problems.values())[:6])


@pytest.fixture
def settings(rows, tmp_path):
    return EvalSettings(
        env="arithmetic",
        base_url="http://127.0.0.1:9/v1",
        model="adder",
        data=rows,
        output=tmp_path / "out",
        concurrency=3,
        max_retries=2,
        retry_seconds=0.01,
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def started(settings, rows, server, *arguments, **options):
    """The command as its own process."""
    command = [sys.executable, "-m", "skyrl_gym.eval", "--env", "arithmetic", "--base-url", server.base_url]
    command += ["--model", "adder", "--data", str(rows), "--output", str(settings.output), "--quiet"]
    return subprocess.Popen([*command, *arguments], **options)


def wait_for_lines(settings, number, process):
    path, give_up = settings.output / "episodes.jsonl", time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= number):
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.02)


def episodes(settings):
    return [json.loads(line) for line in (settings.output / "episodes.jsonl").read_text().splitlines()]


def test_perfect_model_is_correct_on_every_task(settings):
    with ChatServer(right) as server:
        summary = evaluate(replace(settings, base_url=server.base_url))
    assert (summary.num_tasks, summary.num_scored, summary.is_complete) == (6, 6, True)
    assert summary.pass_at[1].mean == summary.reward.mean == 1.0
    # Exact: 0.025 = p^6 at the lower end.
    assert summary.pass_at[1].low == pytest.approx(0.025 ** (1 / 6))
    assert (summary.pass_at[1].high, summary.pass_at[1].method) == (1.0, "Clopper-Pearson")
    assert summary.environment == {"answered": 1.0}
    assert summary.means["completion_tokens"] == 3
    assert sorted(each["task"] for each in episodes(settings)) == [0, 1, 2, 3, 4, 5]
    assert [message["role"] for message in episodes(settings)[0]["messages"]] == ["user", "assistant"]
    assert json.loads((settings.output / "summary.json").read_text())["pass_at"]["pass@1"]["mean"] == 1.0


def test_pass_at_k_of_alternating_model(settings):
    """Two of four are right: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6, pass@4 = 1."""
    with ChatServer(RightEveryOther()) as server:
        summary = evaluate(replace(settings, base_url=server.base_url, num_samples=4, pass_k=(1, 2, 4)))
    assert summary.pass_at[1].mean == 0.5
    assert summary.pass_at[2].mean == pytest.approx(5 / 6)
    assert summary.pass_at[4].mean == 1.0
    assert summary.pass_at[1].method == "bootstrap"
    assert "pass@2              0.8333" in table(summary)


@pytest.mark.parametrize("n, c, k", [(1, 0, 1), (1, 1, 1), (4, 2, 2), (5, 1, 3), (6, 5, 2), (6, 0, 6)])
def test_pass_at_k_is_fraction_of_subsets_with_correct_sample(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("n, c, k", [(4, 2, 5), (4, 5, 1), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_of_nonsense_is_refused(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    "x, n, low, high",
    [
        (0, 10, 0.0, 0.3085),  # published tables
        (5, 10, 0.1871, 0.8129),
        (1, 20, 0.0013, 0.2487),
        (1000, 1319, 0.7341, 0.7811),
    ],
)
def test_exact_intervals_agree_with_published_tables(x, n, low, high):
    assert clopper_pearson(x, n) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_bootstrap_interval_is_about_two_standard_errors():
    values = [0.0, 0.5, 1.0] * 100
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values)
    standard_error = (1 / 6) ** 0.5 / 300**0.5
    assert (high - low) / 2 == pytest.approx(1.96 * standard_error, rel=0.1)
    assert estimate([]) is None


def test_finished_evaluation_sends_no_request(settings):
    with ChatServer(right) as server:
        running = replace(settings, base_url=server.base_url)
        first = evaluate(running)
        assert len(server.requests) == 6
        assert evaluate(running) == first
        assert len(server.requests) == 6
        evaluate(replace(running, num_samples=2))  # more samples are added to those there
        assert len(server.requests) == 12


def test_other_settings_need_another_folder(settings):
    with ChatServer(right) as server:
        running = replace(settings, base_url=server.base_url)
        evaluate(running)
        with pytest.raises(Error, match="--temperature"):
            evaluate(replace(running, temperature=0.5))


def test_busy_and_broken_servers_are_asked_again(settings):
    seen = Counter()

    def stumbling(messages):
        problem = messages[0]["content"]
        seen[problem] += 1
        if seen[problem] == 1:
            return 429, {"error": "slow down"}, {"Retry-After": "0"}
        return (500, {"error": "oops"}) if seen[problem] == 2 else solve(problem)

    with ChatServer(stumbling) as server:
        summary = evaluate(replace(settings, base_url=server.base_url, concurrency=1))
    assert summary.is_complete and summary.reward.mean == 1.0
    assert set(seen.values()) == {3}


def test_failures_are_counted_by_kind_and_never_as_zero(settings):
    problems = [json.loads(line)["prompt"][0]["content"] for line in settings.data.read_text().splitlines()]

    def partly(messages):
        match problems.index(messages[0]["content"]):
            case 0:
                return 503, {"error": "no GPU"}
            case 1:
                return 400, {"error": "context length exceeded"}
            case 2:
                return 200, b"<html>not JSON</html>"
            case 3:
                return 200, {"choices": []}
            case 4:
                return solve(messages[0]["content"], error=1)
            case _:
                return solve(messages[0]["content"])

    with ChatServer(partly) as server:
        running = replace(settings, base_url=server.base_url)
        summary = evaluate(running)
        assert summary.failures == {"infra": 1, "model": 3}
        assert (summary.num_scored, summary.reward.mean) == (2, 0.5)
        assert "503" in summary.errors["infra"]
        by_task = {each["task"]: each for each in episodes(running)}
        assert by_task[0]["reward"] is None and by_task[0]["messages"] == [{"role": "user", "content": problems[0]}]
        assert "context length exceeded" in by_task[1]["error"]
        assert "failed and not counted above" in table(summary)

        server.answer = right  # failed episodes are played again, the others are not
        asked = len(server.requests)
        again = evaluate(running)
    assert (again.failures, again.num_scored, len(server.requests) - asked) == ({}, 6, 4)
    assert again.reward.mean == pytest.approx(5 / 6)


HANGS = threading.Event()


class FaultyEnv(BaseTextEnv):
    """Fails in the way the row says."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.fault = extras["fault"]

    def step(self, action):
        if self.fault == "service":
            raise InfraError("the database is away")
        if self.fault == "bug":
            raise KeyError("oops")
        if self.fault == "hang":
            HANGS.set()
            time.sleep(3600)
        reward = None if self.fault == "contract" else 1.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def test_environment_faults_are_distinguished_from_service_faults(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faulty", sys.modules[__name__])
    faults = ["service", "bug", "hang", "contract", "none"]
    data = write(tmp_path / "faults.jsonl", [{"prompt": fault, "fault": fault} for fault in faults])
    with ChatServer(lambda messages: "hm") as server:
        summary = evaluate(
            replace(settings, env="faulty:FaultyEnv", data=data, base_url=server.base_url, episode_seconds=0.5)
        )
    assert summary.failures == {"infra": 1, "environment": 3}
    found = {each["task"]: each["error"] for each in episodes(settings)}
    assert found[2] == "DeadlineExceeded: did not return within 0.5 s"
    assert "finite number as reward" in found[3]
    assert found[4] is None


def test_hanging_episode_is_recorded_up_to_last_turn(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faulty", sys.modules[__name__])
    monkeypatch.setattr("skyrl_gym.eval.runner.LEAVE_SECONDS", 0.1)
    HANGS.clear()
    data = write(tmp_path / "faults.jsonl", [{"prompt": fault, "fault": fault} for fault in ("none", "hang")])
    path, main_thread = settings.output / "episodes.jsonl", threading.get_ident()

    def interrupt():
        while not (HANGS.is_set() and path.exists() and path.read_bytes()):
            time.sleep(0.02)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with ChatServer(lambda messages: "hm") as server, pytest.raises(Stopped) as stopped:
        threading.Thread(target=interrupt, daemon=True).start()
        evaluate(replace(settings, env="faulty:FaultyEnv", data=data, base_url=server.base_url))
    assert (stopped.value.summary.num_scored, stopped.value.summary.failures) == (1, {"cancelled": 1})
    cut_off = episodes(settings)[-1]
    assert [message["content"] for message in cut_off["messages"]] == ["hang", "hm"]


def test_several_turns_and_stop_strings(settings, tmp_path):
    """The server cuts the stop string off; the environment still sees the whole tag."""
    data = write(tmp_path / "calculator.jsonl", [SIX_TIMES_SEVEN])

    def calculating(messages):
        if len(messages) == 1:
            return "<calculator>6*7"
        assert messages[-1]["content"] == "<result>42</result>"
        return "<answer>42"

    with ChatServer(calculating) as server:
        stop = ("</calculator>", "</answer>")
        running = replace(settings, env="calculator", data=data, base_url=server.base_url, stop=stop, temperature=0.7)
        summary = evaluate(replace(running, seed=3))
    assert summary.reward.mean == 1.0 and summary.means["turns"] == 2
    first, second = server.requests
    assert first["stop"] == list(stop) and first["temperature"] == 0.7
    assert second["seed"] == first["seed"] + 1


@pytest.mark.parametrize(
    "text, stop_reason, expected",
    [
        ("<search>who", None, "<search>who</search>"),
        ("<search>who</search> <answer>me", None, "<search>who</search> <answer>me</answer>"),
        ("<answer>me</answer>", None, "<answer>me</answer>"),
        ("no tag at all", None, "no tag at all"),
        ("Observation", "</search>", "Observation</search>"),  # vLLM says which one it was
        ("all done", 151645, "all done"),  # the end-of-sequence token
    ],
)
def test_stop_strings_are_put_back(text, stop_reason, expected):
    assert with_stop_string(text, ["</search>", "</answer>"], stop_reason) == expected


def test_turn_truncated_at_token_limit_is_reported(settings):
    with ChatServer(lambda messages: (200, completion("<answer>", finish_reason="length"))) as server:
        summary = evaluate(replace(settings, base_url=server.base_url, limit=2, max_tokens=5))
    assert summary.means["turn_cut_off"] == 1.0
    assert server.requests[0]["max_tokens"] == 5


def test_unreachable_server_is_named_before_first_episode(settings):
    with pytest.raises(Error, match="--base-url"):
        evaluate(replace(settings, base_url=f"{unused_url()}/v1"))
    assert episodes(settings) == []


def test_server_crash_stops_evaluation_and_next_run_resumes(settings, tmp_path):
    data = write(tmp_path / "many.jsonl", make_problems(60, num_digits=4, seed=2, instruction=""))
    running = replace(settings, data=data, concurrency=2, max_retries=0)
    answered = threading.Semaphore(20)

    def dying(messages):
        return right(messages) if answered.acquire(blocking=False) else (502, {"error": "gone"})

    text = r"10 episodes in a row failed; last: infra, .*run again to continue"
    with ChatServer(dying) as server, pytest.raises(InfraError, match=text):
        evaluate(replace(running, base_url=server.base_url))
    with ChatServer(right) as server:
        summary = evaluate(replace(running, base_url=server.base_url))
    assert summary.is_complete and summary.reward.mean == 1.0
    assert len(server.requests) == 40


def test_evaluation_stops_early_when_every_episode_fails(settings, tmp_path):
    data = write(tmp_path / "many.jsonl", make_problems(60, seed=2, instruction=""))
    with ChatServer(lambda messages: (400, {"error": "unknown field max_tokens"})) as server:
        with pytest.raises(InfraError, match="max_tokens"):
            evaluate(replace(settings, data=data, base_url=server.base_url))
        assert len(server.requests) < 20


def test_lone_surrogate_from_model_can_be_sent_back(settings, tmp_path):
    data = write(tmp_path / "calculator.jsonl", [SIX_TIMES_SEVEN])
    with ChatServer(lambda messages: "\ud83d" if len(messages) == 1 else "<answer>42</answer>") as server:
        summary = evaluate(replace(settings, env="calculator", data=data, base_url=server.base_url))
    assert summary.reward.mean == 1.0
    assert server.requests[1]["messages"][1]["content"] == "\ufffd"


@pytest.mark.parametrize("status, flag", [(401, "--api-key-env"), (404, "--base-url or --model")])
def test_rejected_request_names_flag_and_stops_evaluation(settings, status, flag):
    with ChatServer(lambda messages: (status, {"error": "no"})) as server:
        with pytest.raises(Error, match=f"status {status} .*check {flag}"):
            evaluate(replace(settings, base_url=server.base_url))
        assert len(server.requests) <= settings.concurrency


def test_api_key_is_read_from_environment(settings, monkeypatch):
    with ChatServer(right, api_key="secret") as server:
        running = replace(settings, base_url=server.base_url, api_key_env="MY_KEY")
        with pytest.raises(Error, match="check --api-key-env"):
            evaluate(running)
        monkeypatch.setenv("MY_KEY", "secret")
        assert evaluate(running).is_complete


def test_killed_evaluation_resumes(settings, rows):
    """SIGKILL in the middle; every episode is in the file once in the end, and none was asked for twice after it."""

    def slow(messages):
        time.sleep(0.1)
        return right(messages)

    with ChatServer(slow) as server:
        limits = ("--concurrency", "1", "--num-samples", "5")
        process = started(settings, rows, server, *limits, stdout=subprocess.DEVNULL)
        wait_for_lines(settings, 3, process)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        finished = len(episodes(settings))
        with (settings.output / "episodes.jsonl").open("a") as file:
            file.write('{"task": 0, "sample": 4, "messa')  # what a kill in the middle of a write leaves
        asked = len(server.requests)
        summary = evaluate(replace(settings, base_url=server.base_url, num_samples=5))
    assert 3 <= finished < 30
    assert len(server.requests) - asked == 30 - finished
    assert summary.is_complete
    assert Counter((each["task"], each["sample"]) for each in episodes(settings)).most_common(1)[0][1] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_stops_evaluation_and_keeps_all_episodes(settings, rows, number):
    """Even while the model takes its time."""
    served = threading.Semaphore(2)
    over = threading.Event()

    def stuck(messages):
        if not served.acquire(blocking=False):
            over.wait(60)
        return right(messages)

    with ChatServer(stuck) as server:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = started(settings, rows, server, "--concurrency", "2", **pipes)
        wait_for_lines(settings, 2, process)
        while len(server.requests) < 4:
            time.sleep(0.02)
        process.send_signal(number)
        summary, said = process.communicate(timeout=20)
        over.set()
    assert process.returncode == 128 + number
    assert "run again to continue" in said and "Traceback" not in said
    assert "2 of 6 scored" in summary
    assert "cancelled           2, e.g. the evaluation was stopped" in summary
    *finished, first, second = episodes(settings)
    assert [each["failure"] for each in finished] == [None] * 2
    for cut_off in (first, second):
        assert (cut_off["failure"], cut_off["reward"], cut_off["success"]) == ("cancelled", None, None)
        assert [message["role"] for message in cut_off["messages"]] == ["user"]
    with ChatServer(right) as server:
        assert evaluate(replace(settings, base_url=server.base_url)).is_complete
        assert len(server.requests) == 4


def test_last_record_of_episode_wins_and_file_has_single_writer(tmp_path):
    with EpisodeFile(tmp_path, {}) as file:
        file.add(EpisodeRecord(task=0, sample=0, failure="infra"))
        assert not file.is_finished((0, 0))
        file.add(EpisodeRecord(task=0, sample=0, reward=1.0))
        with pytest.raises(Error, match="another evaluation is writing there"):
            EpisodeFile(tmp_path, {})
    with EpisodeFile(tmp_path, {}) as file:
        assert file.is_finished((0, 0)) and not file.is_finished((0, 1))


def test_parquet_rows_are_read_like_json_lines(settings, rows, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="reading parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = pyarrow.Table.from_pylist([json.loads(line) for line in rows.read_text().splitlines()])
    parquet.write_table(columns, tmp_path / "rows.parquet")
    with ChatServer(right) as server:
        summary = evaluate(replace(settings, base_url=server.base_url, data=tmp_path / "rows.parquet"))
    assert summary.reward.mean == 1.0


def test_command_line_prints_table_and_sets_exit_code(settings, rows, capsys):
    with ChatServer(RightEveryOther()) as server:
        command = ["--env", "arithmetic", "--base-url", server.base_url, "--model", "adder", "--data", str(rows)]
        command += ["--output", str(settings.output), "--num-samples", "2", "--pass-k", "1,2", "--quiet"]
        assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"pass@1 +0\.5000  95% \[", printed) and re.search(r"pass@2 +1\.0000", printed)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--pass-k", "4"], "--pass-k 4 needs at least 4 samples of each task; --num-samples is 1"),
        (["--num-samples", "0"], "--num-samples must be at least 1; got 0"),
        (["--base-url", "127.0.0.1:8000"], "--base-url must begin with http:// or https://"),
        (["--data", "missing.jsonl"], "--data: no such file missing.jsonl"),
        (["--env", "arithmetix"], "did you mean arithmetic"),
        (["--env", "no_such_module:Env"], "--env no_such_module:Env cannot be imported"),
    ],
)
def test_wrong_settings_are_named_by_flag(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    defaults = ["--env", "arithmetic", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    assert main([*defaults, *arguments]) == 2
    assert text in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "content, text",
    [
        ('{"prompt": "1+1"}\n{"question": "1+1"}\n', "row 1: a row needs a column `prompt`"),
        ('{"prompt": "1+1"}\nnot JSON\n', "line 2: not JSON"),
        ('{"prompt": [3]}\n', "row 0: prompt must be a list of chat messages"),
        ("", "has no rows"),
    ],
)
def test_wrong_rows_are_named(settings, tmp_path, content, text):
    data = tmp_path / "wrong.jsonl"
    data.write_text(content)
    with pytest.raises(Error, match=text):
        evaluate(replace(settings, data=data))
