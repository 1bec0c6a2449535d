"""Every dataset builder under examples/ is run as its user would, and what it wrote is played: the environment of each
row is made with that row's columns, and a perfect answer, made from the row or its source, earns the full reward.
"""

import gzip
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from composed_scripts import load_script

import skyrl_gym
from skyrl_gym.episode import EpisodeResult, run_episode
from skyrl_train.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
BUILDERS = sorted(path for path in EXAMPLES.glob("*/*_dataset.py"))
ROW_COLUMNS = ("prompt", "env_class")

GSM8K = [
    {"question": f"What is {n} + 1000?", "answer": f"Add them.\n#### {n + 1000:,}"} for n in (1, 22, 333, 4444, 55555)
]


def build(script: str, output: Path, *arguments: object) -> dict[str, list[dict[str, Any]]]:
    """Run a builder's main program in this process. Returns: the rows that it wrote, by file."""
    load_script(EXAMPLES / script).main(["--output_dir", str(output), *map(str, arguments)])
    return {
        name: pyarrow.parquet.read_table(output / f"{name}.parquet").to_pylist() for name in ("train", "validation")
    }


def extras_of(row: dict[str, Any]) -> dict[str, Any]:
    """The other columns, as the trainer hands them on."""
    return {name: value for name, value in row.items() if name not in ROW_COLUMNS}


def play(row: dict[str, Any], turns: list[str], env_config: Any = None, **extras: Any) -> EpisodeResult:
    """An episode of the row's environment in which the model says `turns`."""
    said = iter(turns)
    env = skyrl_gym.make(row["env_class"], env_config=env_config or {}, extras=extras_of(row) | extras)
    return run_episode(env, row["prompt"], lambda _: next(said))


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def gsm8k_files(folder: Path) -> list[Path]:
    return [
        write_json_lines(folder / "train.jsonl.gz", GSM8K[:3]),
        write_json_lines(folder / "validation.jsonl", GSM8K[3:]),
    ]


@pytest.mark.parametrize("script", BUILDERS, ids=lambda path: path.stem)
def test_builder_prints_help(script, capsys):
    with pytest.raises(SystemExit) as end:
        load_script(script).main(["--help"])
    explained = capsys.readouterr().out
    assert end.value.code == 0
    assert "--output_dir" in explained
    assert f"python examples/{script.parent.name}/{script.name} " in explained


# What they share


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "json.gz", "parquet"])
def test_all_file_formats_are_read(tmp_path, suffix):
    for name, rows in (("train", GSM8K[:3]), ("test", GSM8K[3:])):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif "jsonl" in suffix:
            write_json_lines(path, rows)
        else:
            content = json.dumps(rows).encode()
            path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    rows = build("gsm8k/gsm8k_dataset.py", tmp_path / "out", "--input", tmp_path)
    assert [row["reward_spec"]["ground_truth"] for row in rows["train"]] == ["1001", "1022", "1333"]
    assert [row["reward_spec"]["ground_truth"] for row in rows["validation"]] == ["5444", "56555"]


def test_validation_fraction_is_held_out(tmp_path):
    path = write_json_lines(tmp_path / "train.jsonl", GSM8K)
    rows = build("gsm8k/gsm8k_dataset.py", tmp_path / "out", "--input", path, "--validation_share", 0.4)
    questions = {name: [row["extra_info"]["question"] for row in part] for name, part in rows.items()}
    with pytest.raises(DataError, match="--validation_share"):  # one set alone needs it
        build("gsm8k/gsm8k_dataset.py", tmp_path / "out", "--input", path)
    assert (len(questions["train"]), len(questions["validation"])) == (3, 2)
    assert sorted(questions["train"] + questions["validation"]) == sorted(row["question"] for row in GSM8K)


def test_split_is_read_from_folder_name(tmp_path):
    paths = []
    for split, rows in (("train", GSM8K[:3]), ("test", GSM8K[3:])):
        (tmp_path / split / "code").mkdir(parents=True)
        paths.append(write_json_lines(tmp_path / split / "code" / "problems.jsonl", rows))
    rows = build("gsm8k/gsm8k_dataset.py", tmp_path / "out", "--input", *paths)
    assert (len(rows["train"]), len(rows["validation"])) == (3, 2)


def test_hub_datasets_are_read_by_name_config_and_split(tmp_path):
    """A folder is a name too, for the library that reads the hub."""
    gsm8k_files(tmp_path)
    (tmp_path / "test.jsonl").write_text((tmp_path / "validation.jsonl").read_text())
    script = str(EXAMPLES / "gsm8k" / "gsm8k_dataset.py")
    sources = ["--hub_train", f"{tmp_path}:default@train", "--hub_test", f"{tmp_path}@test"]
    command = [sys.executable, script, "--output_dir", str(tmp_path / "out"), *sources]
    offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_spec"]["ground_truth"] for row in rows] == ["1001", "1022", "1333"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("[1, 2]\n", "must hold a list of JSON objects"),
        (json.dumps({"question": "?"}) + "\n", "train problem 0 has no column 'answer'; its columns are question"),
    ],
)
def test_unusable_files_are_reported(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        build("gsm8k/gsm8k_dataset.py", tmp_path / "out", "--input", tmp_path)


# Each builder, and its environment


def test_gsm8k_rows_are_solved_in_single_turn(tmp_path):
    for row in build("gsm8k/gsm8k_dataset.py", tmp_path, "--input", *gsm8k_files(tmp_path))["train"]:
        assert play(row, [row["extra_info"]["answer"].replace(",", "")]).total_reward == 1.0


def test_gsm8k_rows_are_solved_in_second_turn(tmp_path):
    rows = build("gsm8k_multi_turn/gsm8k_multi_turn_dataset.py", tmp_path, "--input", *gsm8k_files(tmp_path))
    for row in rows["train"]:
        assert row["extra_info"]["max_turns"] == 5
        result = play(row, ["#### 7", f"#### {row['reward_spec']['ground_truth']}"])
        assert result.outcome_reward == 1.0
        assert result.total_reward == pytest.approx(1.0 + 0.2 / 5)


def test_math_rows_are_solved(tmp_path, test_data):
    rows = build(
        "math/math_dataset.py", tmp_path, "--input", test_data / "math/math500.jsonl.gz", "--validation_share", 0.1
    )
    assert (len(rows["train"]), len(rows["validation"])) == (450, 50)
    for row in rows["validation"][:10]:
        assert play(row, [rf"So it is \boxed{{{row['reward_spec']['ground_truth']}}}."]).outcome_reward == 1.0


def test_math_answer_is_extracted_from_solution(tmp_path):
    solutions = ["No box, so left out.", r"First \boxed{9}, then \boxed{\frac{1}{2}}.", r"\boxed{x^{2}}"]
    path = write_json_lines(tmp_path / "set.jsonl", [{"problem": "?", "solution": text} for text in solutions])
    rows = build("math/math_dataset.py", tmp_path, "--input", path, "--validation_share", 0.5)
    answers = [row["reward_spec"]["ground_truth"] for part in rows.values() for row in part]
    assert sorted(answers) == [r"\frac{1}{2}", "x^{2}"]


def test_aime_rows_are_solved_and_deduplicated(tmp_path):
    published = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Find n. End with a line Answer: n."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    }
    write_json_lines(tmp_path / "train.jsonl", [published, published])
    write_json_lines(tmp_path / "test.jsonl", [{"problem": "Find m.", "answer": 204}])
    rows = build("aime/aime_dataset.py", tmp_path / "out", "--input", tmp_path)
    assert len(rows["train"]) == 1
    assert rows["train"][0]["prompt"] == published["prompt"]
    for row in rows["train"] + rows["validation"]:
        assert play(row, [f"So be it.\nAnswer: {row['reward_model']['ground_truth']}"]).total_reward == 1.0
        assert play(row, ["Answer: 1"]).total_reward == -1.0


def test_aime_prompts_with_several_answers_are_dropped(tmp_path):
    """Same cleaning as in DAPO-Math-17k: first exact duplicates are dropped, then every prompt whose answers differ."""

    def published(problem: str, answer: str, source: str = "math_dapo") -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"{problem} End with a line Answer: n."}]
        return {"data_source": source, "prompt": prompt, "ability": "MATH", "reward_model": {"ground_truth": answer}}

    agreed, disputed = published("Find a.", "1"), [published("Find b.", "2"), published("Find b.", "3")]
    twice = published("Find a.", "1", source="another_set")  # no exact duplicate, and the same answer
    write_json_lines(tmp_path / "train.jsonl", [agreed, *disputed, agreed, disputed[0], twice])
    write_json_lines(tmp_path / "test.jsonl", [published("Find b.", "2")])
    rows = build("aime/aime_dataset.py", tmp_path / "out", "--input", tmp_path)
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows["train"]] == [
        ("math_dapo", "1"),
        ("another_set", "1"),
    ]
    assert len(rows["validation"]) == 1  # what is disputed in one split does not leave the other
    prepared = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert prepared["train.parquet"]["rows"] == 2


def test_multiply_rows_are_solved_and_validation_is_held_out(tmp_path):
    rows = build("multiply/multiply_dataset.py", tmp_path, "--num_digits", 2, "--train_size", 500, "--test_size", 50)
    assert (len(rows["train"]), len(rows["validation"])) == (500, 50)
    questions = [{row["extra_info"]["question"] for row in part} for part in rows.values()]
    assert not questions[0] & questions[1]
    for row in rows["validation"][:5]:
        result = play(row, ["I guess.", rf"\boxed{{{row['reward_spec']['ground_truth']}}}"])
        assert result.outcome_reward == 1.0
    again = build("multiply/multiply_dataset.py", tmp_path / "again", "--train_size", 500, "--test_size", 50)
    assert again == rows


def test_search_rows_are_solved(tmp_path, test_data):
    folder = test_data / "search_qa"
    files = [folder / "nq_open_dev.jsonl.gz", folder / "bamboogle.jsonl.gz"]
    rows = build("search/searchr1_dataset.py", tmp_path, "--input", *files, "--validation_share", 0.1)
    assert (len(rows["train"]), len(rows["validation"])) == (125, 3610)  # two sets there are: the share is not needed
    for row in rows["validation"][:20]:
        question, target = row["extra_info"]["question"], row["reward_spec"]["ground_truth"]["target"]
        assert question in row["prompt"][-1]["content"]
        result = play(row, [f"<think>Yes.</think><answer>{target[-1]}</answer>"])
        assert result.total_reward == 1.0, (question, target)


def test_published_search_rows_are_kept(tmp_path):
    published = {
        "data_source": "nq",
        "question": "who wrote it",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Anna", "Anna B."]}},
    }
    path = write_json_lines(tmp_path / "set.jsonl", [published] * 2)
    rows = build("search/searchr1_dataset.py", tmp_path, "--input", path, "--validation_share", 0.5)
    (row,) = rows["train"]
    assert row["data_source"] == "searchR1_nq"
    assert row["reward_spec"] == published["reward_model"]
    assert row["extra_info"]["need_tools_kwargs"] is True


def test_search_rows_read_instruction_from_prompt_column(tmp_path):
    """A row without a prompt (another evaluation set, say) gets the words of those that have one."""

    def problem(question: str, prompt: str | None) -> dict[str, Any]:
        row: dict[str, Any] = {"question": question, "golden_answers": ["Anna"], "data_source": "nq"}
        return row | ({} if prompt is None else {"prompt": [{"role": "user", "content": prompt}]})

    write_json_lines(tmp_path / "train.jsonl", [problem("who wrote it", "Search first. Question: who wrote it?\n")])
    write_json_lines(tmp_path / "test.jsonl", [problem("Who sang it?", None), problem("who came", None)])
    rows = build("search/searchr1_dataset.py", tmp_path / "out", "--input", tmp_path)
    asked = [row["prompt"] for row in rows["train"] + rows["validation"]]
    system = {"role": "system", "content": "You are a helpful and harmless assistant."}
    assert all(prompt[0] == system for prompt in asked)
    assert [prompt[1]["content"] for prompt in asked] == [
        "Search first. Question: who wrote it?\n",
        "Search first. Question: Who sang it?\n",
        "Search first. Question: who came?\n",
    ]


def test_text2sql_rows_are_solved(tmp_path, test_data, spider):
    published = read_json_lines(test_data / "sql_spider" / "dev.jsonl.gz")[::10]
    path = write_json_lines(tmp_path / "spider.jsonl", published)
    rows = build(
        "text2sql/text2sql_dataset.py", tmp_path, "--input", path, "--db_path", spider, "--validation_share", 0.2
    )
    made = rows["train"] + rows["validation"]
    assert len(made) == sum(problem["n_rows"] > 0 for problem in published)
    for row in rows["validation"]:
        query = row["reward_spec"]["ground_truth"]
        assert "CREATE TABLE" in row["prompt"][0]["content"]
        turns = [f"<think>a</think><sql>{query}</sql>", f"<think>b</think><solution>{query}</solution>"]
        assert play(row, turns, {"db_path": str(spider)}).total_reward == 1.0, query


def make_zoo(folder: Path) -> None:
    (folder / "database" / "zoo").mkdir(parents=True)
    with closing(sqlite3.connect(folder / "database" / "zoo" / "zoo.sqlite")) as connection, connection:
        connection.executescript("CREATE TABLE animal (name TEXT); INSERT INTO animal VALUES ('yak'), ('emu')")


def test_text2sql_skips_empty_results_and_keeps_prepared_rows(tmp_path):
    make_zoo(tmp_path / "spider")
    queries = ["SELECT name FROM animal", "SELECT name FROM animal WHERE 0", "SELECT nme FROM animal", "SELECT 1"]
    problems = [{"db_id": "zoo", "question": "Which?", "SQL": query, "evidence": "There are two."} for query in queries]
    write_json_lines(tmp_path / "train.jsonl", problems)
    ready = {
        "db_id": "zoo",
        "data": "spider",
        "prompt": [{"role": "user", "content": "Name them."}],
        "reward_spec": {"method": "rule", "ground_truth": queries[0]},
    }
    write_json_lines(tmp_path / "validation.jsonl", [ready])
    rows = build("text2sql/text2sql_dataset.py", tmp_path, "--input", tmp_path, "--db_path", tmp_path)
    assert [row["reward_spec"]["ground_truth"] for row in rows["train"]] == [queries[0], queries[3]]
    assert "Note: There are two." in rows["train"][0]["prompt"][0]["content"]
    (row,) = rows["validation"]
    assert row == ready | {"env_class": "text2sql"}
    turn = f"<think>I know.</think><solution>{queries[0]}</solution>"
    assert play(row, [turn], {"db_path": str(tmp_path)}).total_reward == 1.0
    with pytest.raises(DataError, match="--data"):
        build("text2sql/text2sql_dataset.py", tmp_path, "--input", tmp_path, "--db_path", tmp_path / "elsewhere")


def test_text2sql_evaluation_sets_keep_all_published_questions(tmp_path):
    make_zoo(tmp_path / "Spider-DK")
    words = "Task.\n\nDatabase Schema:\n{}\nThis schema describes it.\n{}\nQuestion:\n{}\n\nInstructions:\nCost: $1"
    train = [{"prompt": [{"role": "user", "content": words.format("CREATE TABLE other (id)", "", "Another?")}]}]
    write_json_lines(tmp_path / "train.jsonl", train)
    problem = {"db_id": "zoo", "SpiderSynQuestion": "Which beasts?", "question": "Which?", "evidence": "Two."}
    queries = ["SELECT name FROM animal", "SELECT name FROM animal WHERE 0"]
    path = write_json_lines(tmp_path / "dk.jsonl", [problem | {"query": query} for query in queries])
    arguments = ["--input", path, "--only_validation", "--keep_empty", "--data", "spider_dk", "--db_path", tmp_path]
    arguments += ["--data_source", "dk", "--question_column", "SpiderSynQuestion", "--prompt_like"]
    load_script(EXAMPLES / "text2sql/text2sql_dataset.py").main(
        ["--output_dir", str(tmp_path / "out"), *map(str, arguments), str(tmp_path / "train.jsonl")]
    )
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "validation.parquet").to_pylist()
    assert not (tmp_path / "out" / "train.parquet").exists()
    assert [(row["data_source"], row["reward_spec"]["ground_truth"]) for row in rows] == [("dk", q) for q in queries]
    schema = "CREATE TABLE animal (name TEXT);"
    assert rows[0]["prompt"][0]["content"] == words.format(schema, "\nNote: Two.\n", "Which beasts?")
    with pytest.raises(DataError, match="'Database Schema:'"):
        load_script(EXAMPLES / "text2sql/text2sql_dataset.py").template_of("Question: which?", "rows")


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
@pytest.mark.usefixtures("needs_sandbox")
def test_rows_with_assertions_are_solved_by_reference(tmp_path, test_data, name):
    problems = [row for row in read_json_lines(test_data / "code" / f"{name}.jsonl.gz") if row["verified"]][::40]
    path = write_json_lines(tmp_path / "set.jsonl", problems)
    rows = build("code/code_dataset.py", tmp_path, "--input", path, "--validation_share", 0.5)
    for row in rows["train"][:3] + rows["validation"][:3]:
        assert play(row, [f"```python\n{row['extra_info']['reference']}\n```"]).total_reward == 1.0
        assert play(row, ["```python\nx = 1\n```"]).total_reward == 0.0


SUM = {
    "description": "Print the sum of the two numbers on the line.",
    "inputs": ["1 2\n", "30 12\n"],
    "outputs": ["3\n", "42\n"],
}
SUM_PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"


@pytest.mark.usefixtures("needs_sandbox")
def test_rows_with_input_and_output_are_solved(tmp_path, test_data):
    write_json_lines(tmp_path / "train.jsonl", [SUM])
    write_json_lines(tmp_path / "test.jsonl", read_json_lines(test_data / "code" / "code_contests_test.jsonl.gz"))
    rows = build("code/code_dataset.py", tmp_path, "--input", tmp_path)
    assert play(rows["train"][0], [SUM_PROGRAM]).total_reward == 1.0
    assert len(rows["validation"]) == 165
    for row in rows["validation"]:
        skyrl_gym.make("code", env_config={}, extras=extras_of(row)).close()


@pytest.mark.usefixtures("needs_sandbox")
def test_livecodebench_rows_are_solved(tmp_path, test_data):
    functional = {
        "question_content": "Add two numbers.",
        "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:",
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
    }
    packed = [{"input": "1 2", "output": "3", "testtype": "stdin", "metadata": None}]
    stdin = {"problem": "Add two numbers.", "tests": packed, "starter_code": ""}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "livecodebench.json").write_text(json.dumps([functional, stdin]))
    (tmp_path / "test").mkdir()
    write_json_lines(
        tmp_path / "test" / "contests.jsonl", read_json_lines(test_data / "code/code_contests_test.jsonl.gz")
    )
    files = [tmp_path / "train" / "livecodebench.json", tmp_path / "test" / "contests.jsonl"]
    rows = build("lcb/lcb_dataset.py", tmp_path, "--input", *files)
    first, second = rows["train"]
    assert "class Solution" in first["prompt"][0]["content"]
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert play(first, [method]).total_reward == 1.0
    assert play(second, [SUM_PROGRAM]).total_reward == 1.0
    assert play(second, ["```python\nprint(4)\n```"]).total_reward == 0.0
    for row in rows["validation"]:
        skyrl_gym.make("lcb", env_config={}, extras=extras_of(row)).close()


@pytest.mark.usefixtures("needs_sandbox")
def test_searchcode_rows_are_solved(tmp_path):
    rows = build("searchcode/searchcode_dataset.py", tmp_path, "--input", *gsm8k_files(tmp_path))
    for row in rows["train"]:
        answer = row["reward_spec"]["ground_truth"]
        turns = [f"<tool><python>print({answer})</python></tool>", f"<solution>#### {answer}</solution>"]
        assert play(row, turns, max_turns=3).total_reward == 1.0


def test_judged_rows_are_solved(tmp_path):
    from skyrl_gym.envs.llm_as_a_judge.local_judge import LocalJudge

    rows = build("llm_as_a_judge/llm_as_a_judge_dataset.py", tmp_path, "--input", *gsm8k_files(tmp_path))
    with LocalJudge() as judge:
        for row in rows["train"]:
            config = {"base_url": judge.base_url}
            assert play(row, [f"It is {row['reward_spec']['ground_truth']}."], config).total_reward == 1.0
            assert play(row, ["It is 7."], config).total_reward == 0.0


def test_reasoning_gym_rows_are_solved(tmp_path):
    pytest.importorskip("reasoning_gym")
    sizes = ("--train_size", 30, "--test_size", 10)
    generators = ("--generators", "chain_sum=2", "caesar_cipher", "spell_backward:1")
    rows = build("reasoning_gym/reasoning_gym_dataset.py", tmp_path, *generators, *sizes)
    assert sum(row["dataset"] == "chain_sum" for row in rows["train"]) == 15
    for row in rows["validation"]:
        assert play(row, [f"<answer>{row['reward_spec']['ground_truth']}</answer>"]).total_reward == 1.0
    assert not {row["entry"] for row in rows["train"]} & {row["entry"] for row in rows["validation"]}


def test_gymnasium_rows_are_solved(tmp_path):
    pytest.importorskip("gymnasium")
    from skyrl_gym.envs.gymnasium.examples import compute_balancing_actions

    settings = json.dumps({"actions_per_turn": 500, "reward_range": [0, 500], "max_turns": 1})
    sizes = ("--train_size", 3, "--test_size", 2)
    rows = build("gymnasium/gymnasium_dataset.py", tmp_path, "--env_id", "CartPole-v1", "--settings", settings, *sizes)
    for row in rows["train"] + rows["validation"]:
        result = play(row, [f"<action>{json.dumps(compute_balancing_actions(row['seed']))}</action>"])
        assert result.outcome_reward == 1.0
    with pytest.raises(skyrl_gym.error.TaskError, match="CartPol-v1"):
        build("gymnasium/gymnasium_dataset.py", tmp_path, "--env_id", "CartPol-v1", *sizes)


def test_textworld_rows_are_solved_by_walkthrough(tmp_path, test_data):
    games = read_json_lines(test_data / "agent_envs" / "textworld_games.jsonl.gz")
    for number, game in enumerate(games[1:]):
        (tmp_path / f"game-{number}.json").write_text(json.dumps(game["game"]))
    write_json_lines(tmp_path / "more.jsonl", games[:1])
    options = ("--validation_share", 0.25, "--max_turns", 40)
    rows = build("textworld/textworld_dataset.py", tmp_path / "out", "--input", tmp_path, *options)
    assert (len(rows["train"]), len(rows["validation"])) == (6, 2)
    for row in rows["train"] + rows["validation"]:
        turns = [f"<action>{command}</action>" for command in row["extra_info"]["walkthrough"]]
        assert play(row, turns).outcome_reward == 1.0


def test_tool_call_rows_are_solved(tmp_path):
    """Rows in the published form: one JSON object a line in .json files, the accepted calls in a folder beside them."""
    question = [[{"role": "user", "content": "Area of a triangle of base 10 and height 5?"}]]
    function = [{"name": "area", "parameters": {"type": "dict", "properties": {"base": {"type": "float"}}}}]
    names = ("simple_0", "simple_1", "irrelevance_0")
    problems = [{"id": name, "question": question, "function": function} for name in names]
    answers = [{"id": name, "ground_truth": [{"area": {"base": [10]}}]} for name in names[:2]]
    (tmp_path / "possible_answer").mkdir()
    write_json_lines(tmp_path / "possible_answer" / "BFCL_v3_simple.json", answers)
    files = [
        write_json_lines(tmp_path / "BFCL_v3_simple.json", problems[:2]),
        write_json_lines(tmp_path / "BFCL_v3_irrelevance.json", problems[2:]),
    ]
    rows = build("tool_call/tool_call_dataset.py", tmp_path, "--input", *files, "--validation_share", 0.4)
    (simple, other), (irrelevant,) = rows["train"], rows["validation"]
    call = '<tool_call>{"name": "area", "arguments": {"base": 10}}</tool_call>'
    for row, right, wrong in ((simple, call, "25"), (other, call, "25"), (irrelevant, "25", call)):
        assert play(row, [right]).total_reward == 1.0
        assert play(row, [wrong]).total_reward == 0.0


@pytest.mark.usefixtures("needs_sandbox")
def test_rlm_rows_are_solved(tmp_path, test_data):
    folder = test_data / "search_qa"
    corpus = ("--corpus", folder / "corpus.jsonl.gz", "--num_passages", 100)
    source = folder / "hotpotqa_with_context.jsonl.gz"
    rows = build("rlm/rlm_dataset.py", tmp_path, "--input", source, *corpus, "--validation_share", 0.1)
    assert (len(rows["train"]), len(rows["validation"])) == (270, 30)
    row = rows["validation"][0]
    assert len(row["extra_info"]["context_text"].split("\n\n")) > 90
    target = row["reward_spec"]["ground_truth"]["target"][0]
    look = f"```repl\nfound = {target!r} in context\nprint(found)\n```"
    result = play(row, [look, f"FINAL({target})"])
    assert result.total_reward == 1.0
    assert "True" in result.messages[-3]["content"]


def test_rlm_reads_hotpotqa_and_names_missing_documents(tmp_path):
    context = {"title": ["Yak", "Emu"], "sentences": [["It is ", "hairy."], ["It runs."]]}
    problem = {"question": "Which is hairy?", "answer": "yak", "context": context}
    path = write_json_lines(tmp_path / "set.jsonl", [problem] * 2)
    (row,) = build("rlm/rlm_dataset.py", tmp_path, "--input", path, "--validation_share", 0.5)["train"]
    assert sorted(row["extra_info"]["context_text"].split("\n\n")) == ["Emu\nIt runs.", "Yak\nIt is hairy."]
    assert play(row, ["FINAL(The yak)"]).total_reward == 1.0
    write_json_lines(tmp_path / "train.jsonl", [{"question": "?", "answer": "yak", "gold_doc_ids": ["d7"]}])
    with pytest.raises(DataError, match="no document d7"):
        build("rlm/rlm_dataset.py", tmp_path, "--input", tmp_path)


def test_environments_with_dataset_have_builder():
    """The quickstart makes the rows of `arithmetic` and `calculator`."""
    folders = {script.parent.name for script in BUILDERS} | {"arithmetic", "calculator"}
    built_in = {id for id, spec in skyrl_gym.registry.items() if str(spec.entry_point).startswith("skyrl_gym.envs")}
    assert folders == built_in
