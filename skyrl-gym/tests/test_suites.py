"""Benchmark suites over small files in published forms, played by a model behind a real server."""

import gzip
import json
import re
import sqlite3
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.registration import env_class_of
from skyrl_gym.error import Error, TaskError
from skyrl_gym.eval.__main__ import main
from skyrl_gym.eval.settings import EvalSettings
from skyrl_gym.eval.statistics import mean_of_sets
from skyrl_gym.eval.suite_data import DataOptions, tasks_of
from skyrl_gym.eval.suite_runs import plan_suites
from skyrl_gym.eval.suites import GROUPS, SUITES, get_suites, markdown

from .chat_server import ChatServer
from .scripted_server import unused_url

ASKED: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
MATH = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in (1, 2)]
GSM8K = [{"question": f"{n} sheep and one more?", "answer": f"Add.\n#### {n + 1}"} for n in (1, 2, 3)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(server, output, suite, *arguments):
    command = ["--suite", suite, "--base-url", server.base_url, "--model", "m", "--output", str(output), "--quiet"]
    return main([*command, *map(str, arguments)])


def lines(output):
    return {line["name"]: line for line in json.loads((output / "suites.json").read_text())}


class Adder:
    """Adds one to the number in the question, in the form that is asked for. Wrong about each question's 2nd answer."""

    def __init__(self):
        self.asked = {}

    def __call__(self, messages):
        question = messages[0]["content"]
        self.asked[question] = self.asked.get(question, 0) + 1
        answer = int(re.findall(r"\d+", question)[0]) + 1 + (self.asked[question] == 2)
        return rf"\boxed{{{answer}}}" if "boxed" in question else f"#### {answer}"


def test_suites_use_own_sampling_and_share_summary_table(tmp_path, capsys):
    write(tmp_path / "data" / "MATH-500.jsonl", MATH)
    write(tmp_path / "data" / "gsm8k" / "test.jsonl", GSM8K)
    write(tmp_path / "data" / "gsm8k" / "train.jsonl", [])
    output = tmp_path / "out"
    with ChatServer(Adder()) as server:
        assert run(server, output, "math500,gsm8k", "--data", tmp_path / "data") == 0
        of_math = [each for each in server.requests if "boxed" in each["messages"][0]["content"]]
        assert (len(of_math), len(server.requests)) == (8, 11)
        assert {(each["temperature"], each["top_p"], each["max_tokens"]) for each in of_math} == {(0.6, 0.95, 4096)}
        assert run(server, output, "math500,gsm8k", "--data", tmp_path / "data") == 0
        assert len(server.requests) == 11, "what is finished is not played again"
    table = capsys.readouterr().out
    # 3 of 4 answers to each problem are right: mean@4 = 0.75; pass@4 = 1.
    assert re.search(
        r"^math500 +2 +mean@4 0\.7500 +\[0\.7500, 0\.7500\] +pass@4 1\.0000 +\[0\.1581, 1\.0000\] +0$", table, re.M
    )
    assert re.search(r"^gsm8k +3 +mean@1 1\.0000 .* pass@1 1\.0000", table, re.M)
    assert lines(output)["gsm8k"]["mean"]["num_tasks"] == 3
    assert len((output / "math500" / "tasks.jsonl").read_text().splitlines()) == 2


def test_flags_override_suite_settings(tmp_path):
    data = write(tmp_path / "math500.json", MATH)
    output = tmp_path / "out"
    with ChatServer(Adder()) as server:
        flags = ("--data", data, "--num-samples", 2, "--temperature", 0.1, "--limit", 1, "--max-tokens", 7)
        assert run(server, output, "math500", *flags) == 0
        assert [(each["temperature"], each["max_tokens"]) for each in server.requests] == [(0.1, 7)] * 2
    line = lines(output)["math500"]
    assert (line["num_samples"], line["k"], line["num_tasks"]) == (2, 2, 1)
    assert (line["mean"]["mean"], line["passed"]["mean"]) == (0.5, 1.0)


def test_finished_suites_are_summarized_when_later_suite_fails(tmp_path, capsys):
    data = [write(tmp_path / "math500.jsonl", MATH), write(tmp_path / "gsm8k.jsonl", GSM8K)]
    adder = Adder()
    with ChatServer(lambda messages: (401, {}) if "sheep" in messages[0]["content"] else adder(messages)) as server:
        assert run(server, tmp_path / "out", "math500,gsm8k", "--data", data[0], "--data", data[1]) == 2
    printed = capsys.readouterr()
    assert re.search(r"^math500 +2 +mean@4 0\.7500", printed.out, re.M) and "check --api-key-env" in printed.err
    assert list(lines(tmp_path / "out")) == ["math500"]


def test_failed_episodes_are_counted_and_in_no_figure(tmp_path, capsys):
    data = write(tmp_path / "gsm8k.jsonl", GSM8K)

    def refusing(messages):
        return (400, {"error": "too long"}) if "2 sheep" in messages[0]["content"] else "#### 2"

    with ChatServer(refusing) as server:
        assert run(server, tmp_path / "out", "gsm8k", "--data", data) == 1
    line = lines(tmp_path / "out")["gsm8k"]
    assert (line["num_failed"], line["num_tasks"], line["mean"]["mean"]) == (1, 2, 0.5)
    assert re.search(r"^gsm8k +2 .* 1$", capsys.readouterr().out, re.M)


def test_group_s_mean_counts_each_set_once(tmp_path):
    """1 of 2 right in one set, 1 of 1 in another, both published in one file: (0.5 + 1) / 2, not 2 / 3."""
    pytest.importorskip("bm25s", reason="the retrieval server needs bm25s")
    from skyrl_gym.envs.search.examples import EXAMPLE_DOCUMENTS
    from skyrl_gym.tools.retrieval import RetrievalServer

    rows = [
        {"data_source": source, "question": question, "golden_answers": [answer]}
        for source, question, answer in (
            ("nq", "What is the capital of Orvane?", "Quillmere"),
            ("nq", "Who founded it?", "Ansel Brackwater"),
            ("popqa", "What is the capital of Orvane?", "Quillmere"),
        )
    ]
    data = write(tmp_path / "seven_sets.jsonl", rows)

    def searching(messages):
        if len(messages) == 2:
            return "<search>capital of Orvane"
        assert "Quillmere" in messages[-1]["content"]
        return "<answer>Quillmere"

    with RetrievalServer(EXAMPLE_DOCUMENTS) as retrieval, ChatServer(searching) as server:
        config = json.dumps({"search_url": retrieval.url})
        suites = ("nq,popqa", "--data", f"search_r1={data}", "--env-config", config)
        assert run(server, tmp_path / "out", *suites) == 0
        assert server.requests[0]["stop"] == ["</search>", "</answer>"]
    found = lines(tmp_path / "out")
    assert (found["nq"]["mean"]["mean"], found["popqa"]["mean"]["mean"]) == (0.5, 1.0)
    mean = found["mean of search_r1 (2 of 7 sets)"]
    assert (mean["mean"]["mean"], mean["num_tasks"]) == (0.75, 3)
    # Variance 0.25 / 2 of the one; the other's exact interval is [0.025, 1].
    above, below = 1.959964 * 0.125**0.5, 0.975
    assert mean["mean"]["high"] - 0.75 == pytest.approx(above / 2)
    assert 0.75 - mean["mean"]["low"] == pytest.approx((above**2 + below**2) ** 0.5 / 2)


def test_mean_of_all_wrong_sets_uses_exact_interval_width():
    """The exact interval of 5 wrong answers reaches up to 0.5218 (1 - 0.025 ** 0.2); two sets: its root 2 by 2."""
    found = mean_of_sets([[0.0] * 5, [0.0] * 5])
    assert found is not None and (found.mean, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx((1 - 0.025**0.2) / 2**0.5)
    differences = mean_of_sets([[0.0] * 5, [0.0] * 5], are_shares=False)
    assert differences is not None and differences.high == 0.0  # 0 is no edge of what may be negative


def test_mean_skips_sets_without_tasks():
    assert mean_of_sets([[], []]) is None
    assert mean_of_sets([[], [1.0, 0.0]]) == mean_of_sets([[1.0, 0.0]])


@pytest.fixture
def zoo(tmp_path):
    """Databases as OmniSQL lays them out, with the published file of Spider dev beside them."""
    folder = tmp_path / "db" / "spider" / "database" / "zoo"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "zoo.sqlite")) as connection, connection:
        connection.executescript("CREATE TABLE animal (name TEXT); INSERT INTO animal VALUES ('yak'), ('emu')")
    questions = [
        ("Which are there?", "SELECT name FROM animal"),
        ("Which are blue?", "SELECT name FROM animal WHERE 0"),
    ]
    problems = [{"db_id": "zoo", "question": question, "query": query} for question, query in questions]
    (tmp_path / "db" / "spider" / "dev.json").write_text(json.dumps(problems))
    return tmp_path / "db"


def test_spider_is_found_next_to_databases_with_every_question(zoo, tmp_path):
    def exploring(messages):
        if len(messages) == 1:
            return "<think>look</think><sql>SELECT name FROM animal"
        return "<think>so</think><solution>SELECT name FROM animal"

    with ChatServer(exploring) as server:
        config = json.dumps({"db_path": str(zoo)})
        assert run(server, tmp_path / "out", "spider_dev", "--env-config", config) == 0
    assert lines(tmp_path / "out")["spider_dev"]["mean"]["mean"] == 0.5
    settings = json.loads((tmp_path / "out" / "spider_dev" / "settings.json").read_text())
    assert settings["--env-config"] == {"rule": "spider", "db_path": str(zoo)}
    assert settings["--max-turns"] == 5


def test_function_call_answers_are_read_from_sibling_folder(tmp_path):
    function = {"name": "area", "parameters": {"type": "dict", "properties": {"base": {"type": "integer"}}}}
    question = [[{"role": "user", "content": "Area of base 10?"}]]
    write(tmp_path / "BFCL_v3_simple.json", [{"id": "simple_0", "question": question, "function": [function]}])
    answer = {"id": "simple_0", "ground_truth": [{"area": {"base": [10]}}]}
    write(tmp_path / "possible_answer" / "BFCL_v3_simple.json", [answer])
    write(
        tmp_path / "BFCL_v3_irrelevance.json", [{"id": "irrelevance_0", "question": question, "function": [function]}]
    )
    with ChatServer(lambda _: '<tool_call>{"name": "area", "arguments": {"base": 10}}</tool_call>') as server:
        assert run(server, tmp_path / "out", "bfcl_simple,bfcl_irrelevance", "--data", tmp_path) == 0
    found = lines(tmp_path / "out")
    assert (found["bfcl_simple"]["mean"]["mean"], found["bfcl_irrelevance"]["mean"]["mean"]) == (1.0, 0.0)


def test_prepared_rows_are_unchanged(tmp_path):
    ready = {
        "prompt": [{"role": "user", "content": "One?"}],
        "env_class": "gsm8k",
        "reward_spec": {"ground_truth": "1"},
    }
    data = write(tmp_path / "rows.jsonl", [ready])
    assert tasks_of("gsm8k", SUITES["gsm8k"], str(data), {}).rows == [ready]
    with pytest.raises(TaskError, match=r"problem 0: .*gsm8k"):
        tasks_of("math500", SUITES["math500"], str(data), {})


def test_duplicate_aime_problems_are_played_once(tmp_path):
    problem = {"prompt": [{"role": "user", "content": "n?"}], "reward_model": {"ground_truth": "34"}}
    tasks = tasks_of("aime24", SUITES["aime24"], str(write(tmp_path / "aime.jsonl", [problem] * 3)), {})
    assert (len(tasks.rows), tasks.num_left_out) == (1, 2)


@pytest.mark.parametrize(
    "file, suite",
    [
        ("math500.jsonl.gz", "math500"),
        ("MATH-500_test.parquet", "math500"),
        ("aime_2024.json", "aime24"),
        ("nq_open_dev.jsonl", "nq"),
        ("2wikimultihopqa.jsonl", "2wiki"),
        ("spider-realistic.json", "spider_realistic"),
        ("BFCL_v3_parallel_multiple.json", "bfcl_parallel_multiple"),
        ("BFCL_v3_parallel.json", "bfcl_parallel"),
        ("gsm8k/test.jsonl", "gsm8k"),
        ("gsm8k/validation.parquet", "gsm8k"),
    ],
)
def test_file_is_recognized_by_suite_name(tmp_path, file, suite):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (path.parent / "train.jsonl").touch()
    (path.parent / f"{suite}_train.jsonl").touch()
    (tmp_path / "other.jsonl").touch()
    assert DataOptions.parse([str(tmp_path)]).source_of(suite, {}) == str(path)


def test_suite_without_file_is_read_from_hub_or_given_data_set(tmp_path):
    assert DataOptions.parse([]).source_of("math500", {}) == "hub:HuggingFaceH4/MATH-500@test"
    assert DataOptions.parse([str(tmp_path)]).source_of("math500", {}) == "hub:HuggingFaceH4/MATH-500@test"
    assert DataOptions.parse(["math500=hub:a/b@test#c0ffee"]).source_of("math500", {}) == "hub:a/b@test#c0ffee"
    assert DataOptions.parse(["search_r1=all.jsonl"]).source_of("popqa", {}) == "all.jsonl"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["math5000"], "--suite math5000: no such suite; did you mean math500?"),
        (["swe_bench"], "--suite swe_bench: .*`python -m skyrl_agent.evaluate examples/agent/swe/swe_bench.yaml ROWS`"),
        (["spider"], r"suite spider_dev needs its database folder: --env-config '\{\"db_path\": \"DIR\"\}'"),
        (
            ["spider_dk", "--env-config", '{"db_path": "."}'],
            "spider_dk: no database folder Spider-DK/database",
        ),
        (["gsm8k", "--env-config", '{"topk": 3}'], "--env-config: no environment of these suites has a setting 'topk'"),
        (["gsm8k", "--data", "gsm8=x.jsonl"], "--data gsm8=x.jsonl: no suite 'gsm8'; did you mean gsm8k?"),
        (["gsm8k", "--data", "x.jsonl"], "--data x.jsonl: no such file or folder"),
        (["gsm8k", "--data", "gsm8k=x.jsonl"], "--data: no such file x.jsonl"),
        (["bfcl_simple"], "no file for suite bfcl_simple: .*--data bfcl_simple=FILE"),
        (["gsm8k", "--pass-k", "4"], "suite gsm8k: --pass-k 4 needs at least 4 samples"),
    ],
)
def test_mistakes_are_named_before_anything_is_played(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with ChatServer(Adder()) as server:
        assert run(server, tmp_path / "out", *arguments) == 2
        assert server.requests == []
    assert re.search(text, capsys.readouterr().err)


def test_retrieval_server_is_probed_once_before_any_episode(tmp_path):
    data = write(tmp_path / "nq.jsonl", [{"question": "?", "answer": "a"}])
    url = unused_url()
    with pytest.raises(
        Error, match=f"the retrieval server at {url} does not respond: .*python -m skyrl_gym.tools.retrieval"
    ):
        plan_suites(["nq"], [str(data)], tmp_path / "out", ASKED | {"env_config": {"search_url": url}})
    assert not (tmp_path / "out").exists()


def test_missing_hub_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Error, match=r"MATH-500@test .*pip install datasets"):
        plan_suites(["math500"], [], tmp_path, ASKED)


def test_ambiguous_files_are_listed(tmp_path):
    for name in ("hotpotqa_500.jsonl", "hotpotqa_with_context.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(Error, match="--data"):
        DataOptions.parse([str(tmp_path)]).source_of("hotpotqa", {})


def test_problems_of_another_set_or_form_are_refused(tmp_path):
    other = write(tmp_path / "a.jsonl", [{"data_source": "nq", "question": "?", "answer": "a"}])
    with pytest.raises(Error, match="suite popqa"):
        tasks_of("popqa", SUITES["popqa"], str(other), {})
    with pytest.raises(TaskError, match=r"suite math500: .*column solution"):
        tasks_of("math500", SUITES["math500"], str(write(tmp_path / "b.jsonl", [{"problem": "?"}])), {})
    with pytest.raises(Error, match="has no usable problem"):
        tasks_of("gsm8k", SUITES["gsm8k"], str(write(tmp_path / "c.jsonl", [])), {})


def test_other_tasks_need_another_folder(tmp_path):
    for rows in (MATH, MATH[:1]):
        data = write(tmp_path / "math500.jsonl", rows)
        if rows is MATH:
            plan_suites(["math500"], [str(data)], tmp_path / "out", ASKED)
    with pytest.raises(Error, match="--output"):
        plan_suites(["math500"], [str(data)], tmp_path / "out", ASKED)


def test_suites_and_environments_are_not_mixed(capsys):
    with pytest.raises(SystemExit):
        main(["--suite", "gsm8k", "--env", "gsm8k", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"])
    assert "not allowed with argument" in capsys.readouterr().err
    defaults = ["--env", "gsm8k", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    assert main([*defaults, "--data", "a.jsonl", "--data", "b.jsonl"]) == 2
    assert "--data can be set only once with --env; got a.jsonl, b.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", SUITES)
def test_suite_defaults_are_valid_evaluation_settings(name):
    suite = SUITES[name]
    assert suite.env in skyrl_gym.registry
    assert 1 <= suite.k <= suite.num_samples
    config_class = getattr(env_class_of(skyrl_gym.spec(suite.env)), "config_class", None)
    if suite.env_config:
        assert config_class is not None
        config_class(**suite.env_config)
    EvalSettings(env=suite.env, num_samples=suite.num_samples, pass_k=(suite.k,), max_turns=suite.max_turns, **ASKED)


def test_group_name_expands_to_suites():
    assert list(get_suites(["spider", "spider_dk", "gsm8k"])) == [*GROUPS["spider"], "gsm8k"]
    assert {name for members in GROUPS.values() for name in members} <= SUITES.keys()


GUIDE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.skipif(not GUIDE.exists(), reason="the documentation is not beside the package")
def test_documented_table_matches_code():
    assert markdown() in GUIDE.read_text()


# ---- real data


@pytest.mark.parametrize(
    "name, folder, num_tasks",
    [
        ("math500", "math", 500),
        ("gsm8k", "gsm8k", 1319),
        ("nq", "search_qa", 3610),
        ("2wiki", "search_qa", 500),
        ("musique", "search_qa", 500),
        ("bamboogle", "search_qa", 125),
        ("humaneval", "code", 164),
        ("mbpp", "code", 974),
    ],
)
def test_published_files_are_found_and_become_tasks(test_data, name, folder, num_tasks):
    source = DataOptions.parse([str(test_data / folder)]).source_of(name, {})
    tasks = tasks_of(name, SUITES[name], source, {})
    assert (len(tasks.rows), tasks.num_left_out) == (num_tasks, 0)
    for row in (tasks.rows[0], tasks.rows[-1]):
        extras = {column: value for column, value in row.items() if column != "prompt"}
        skyrl_gym.make(SUITES[name].env, extras=extras).close()


def test_command_line_plays_suites_over_real_data(test_data, tmp_path):
    """A model that knows the first problem of each set is right on it."""
    with tarfile.open(test_data / "sql_spider" / "databases.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path, [each for each in archive.getmembers() if "/concert_singer" in each.name])
    (tmp_path / "spider").mkdir()
    (tmp_path / "databases" / "spider").rename(tmp_path / "spider" / "database")

    def knowing(messages):
        asked = messages[-1]["content"]
        if "boxed" in asked:
            return r"\boxed{\left( 3, \frac{\pi}{2} \right)}"
        return "<think>count</think><solution>SELECT count(*) FROM singer" if "Database" in asked else "#### 18"

    data = ("--data", test_data / "math", "--data", test_data / "gsm8k")
    data = (*data, "--data", f"spider_dev={write_head(test_data, tmp_path)}")
    config = ("--env-config", json.dumps({"db_path": str(tmp_path)}))
    with ChatServer(knowing) as server:
        assert run(server, tmp_path / "out", "math500,gsm8k,spider_dev", *data, *config, "--limit", 1) == 0
    found = lines(tmp_path / "out")
    assert [found[name]["mean"]["mean"] for name in ("math500", "gsm8k", "spider_dev")] == [1.0, 1.0, 1.0]


def write_head(test_data, folder):
    """The questions of Spider dev to one database."""
    text = gzip.decompress((test_data / "sql_spider" / "dev.jsonl.gz").read_bytes()).decode()
    rows = map(json.loads, text.splitlines())
    return write(folder / "dev.jsonl", [row for row in rows if row["db_id"] == "concert_singer"])
