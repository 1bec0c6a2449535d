"""The examples of agents: their scripts write rows that their tasks take, and their task files run."""

import gzip
import json
from pathlib import Path

import pytest

from skyrl_agent.config.task_file import load_task_file
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.general_react.utils import GeneralReactTask
from skyrl_agent.tasks.memory import MemoryAgentTask
from skyrl_agent.tasks.swebench.utils import SWEBenchTask
from skyrl_agent.tasks.web_research_task import WebResearchTask

from ..example_scripts import EXAMPLES, load, written
from ..tools_general.agent_web_server import web_server

parquet = pytest.importorskip("pyarrow.parquet")

JUDGE = {"base_url": "http://127.0.0.1:1"}
PARAGRAPHS = [f"Title {n}\nText {n}." for n in range(30)]
HOTPOT = {
    "id": "h1",
    "question": "Who?",
    "answer": "Anna",
    "context": {"title": ["A", "B"], "sentences": [["Anna did. ", "She did."], ["Bob did not."]]},
}


def file_of(path: Path, *rows: dict) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def checked(task, rows: list[dict]) -> list[dict]:
    for number, row in enumerate(rows):
        task.check_row(Instance(row.get("instance", row), str(number), row["data_source"]))
    return rows


def test_search_rows_are_built(tmp_path):
    path = file_of(
        tmp_path / "nq.jsonl.gz",
        {"question": "who?", "golden_answers": ["Anna", "Ann"]},
        {"question": "what?", "answer": "it"},
        {"question": "none?", "answers": [" "]},
    )
    rows = checked(
        GeneralReactTask(), written("data/search-r1.py", tmp_path, "--input", path, "--validation_share", 0.5)
    )
    assert [row["golden_answers"] for row in rows] == [["Anna", "Ann"], ["it"]]
    assert rows[0]["reward_model"]["ground_truth"]["target"] == ["Anna", "Ann"] and rows[0]["data_source"] == "nq"


def test_memory_rows_mix_paragraphs_with_distractors(tmp_path):
    corpus = file_of(
        tmp_path / "corpus.jsonl", *({"id": str(n), "title": f"Title {n}", "text": f"Text {n}."} for n in range(30))
    )
    path = file_of(
        tmp_path / "hotpot.jsonl", HOTPOT, {"question": "Which?", "answer": "3", "context_doc_ids": ["3", "4"]}
    )
    arguments = ("--input", path, "--corpus", corpus, "--num_documents", 10, "--validation_share", 0.5)
    rows = checked(MemoryAgentTask(), written("data/memagent.py", tmp_path, *arguments))
    first, second = (row["context"] for row in rows)
    assert "A\nAnna did. She did." in first and "B\nBob did not." in first and "Title 3\nText 3." in second
    for context in (first, second):
        assert [f"Document {n}:\n" in context for n in range(1, 12)] == [True] * 10 + [False]
        assert len(set(context.split("\n\n"))) == 10
    assert written("data/memagent.py", tmp_path, *arguments) == rows


def test_memory_rows_use_published_questions(tmp_path, test_data):
    folder = test_data / "search_qa"
    path = folder / "hotpotqa_with_context.jsonl.gz"
    rows = written(
        "data/memagent.py", tmp_path, "--input", path, "--corpus", folder / "corpus.jsonl.gz", "--validation_share", 0.1
    )
    assert len(checked(MemoryAgentTask(), rows)) == 300
    yes_no = {"yes", "no"}
    found = [
        row["golden_answers"][0].lower() in row["context"].lower()
        for row in rows
        if row["golden_answers"][0] not in yes_no
    ]
    assert sum(found) / len(found) > 0.9


def test_missing_corpus_paragraph_is_reported(tmp_path):
    path = file_of(tmp_path / "train.jsonl", {"question": "q", "answer": "a", "context_doc_ids": ["9"]})
    with pytest.raises(SystemExit, match="--corpus"):
        written("data/memagent.py", tmp_path, "--input", path, "--validation_share", 0.5)


def test_research_rows_are_built(tmp_path):
    path = file_of(
        tmp_path / "set.jsonl",
        {"Question": "Q?", "answer": "42", "answer_type": "exactMatch"},
        {
            "prompt": [{"role": "user", "content": "P?"}],
            "extra_info": {"reference_answer": "7"},
            "data_source": "stem_textbook",
        },
    )
    rows = written("data/deep_research.py", tmp_path, "--input", path, "--validation_share", 0.5)
    checked(WebResearchTask(judge=JUDGE), rows)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["42", "7"]
    assert [row["extra_info"].get("answer_type") for row in rows] == ["exactMatch", None]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Q?"}]


def test_browsecomp_rows_are_built(tmp_path):
    path = file_of(tmp_path / "b.jsonl", {"query_id": 7, "query": "Which?", "answer": "That"})
    load(EXAMPLES / "data" / "browsecomp-plus.py").main(["-i", str(path), "-o", str(tmp_path / "x" / "v.parquet")])
    (row,) = checked(GeneralReactTask(judge=JUDGE), parquet.read_table(tmp_path / "x" / "v.parquet").to_pylist())
    assert row["extra_info"]["query_id"] == "7" and row["prompt"][0]["content"].endswith("Which?")


def test_software_rows_are_built(tmp_path):
    r2e = {
        "docker_image": "namanjain12/pandas_final:abc",
        "problem_statement": "It fails.",
        "repo_name": "pandas",
        "expected_output_json": '{"test_a": "PASSED"}',
    }
    bench = {
        "instance_id": "pallets__flask-1",
        "repo": "pallets/flask",
        "base_commit": "abc",
        "version": "4.0",
        "problem_statement": "It fails too.",
        "test_patch": "diff --git a/tests/test_b.py b/tests/test_b.py",
        "FAIL_TO_PASS": '["tests/test_b.py::test_c"]',
        "PASS_TO_PASS": "[]",
    }
    train, test = file_of(tmp_path / "train.jsonl", r2e), file_of(tmp_path / "test.jsonl", bench)
    rows = checked(SWEBenchTask(), written("data/swe_data.py", tmp_path, "--input", train, test))
    assert [row["data_source"] for row in rows] == ["r2e-gym", "swe-bench"]
    assert rows[0]["instance"]["instance_id"] == r2e["docker_image"]
    assert rows[1]["instance"]["instance_id"] == bench["instance_id"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_example_task_files_load(path, monkeypatch):
    from skyrl_agent.runner import AgentRunner

    monkeypatch.setenv("GOOGLE_SEARCH_KEY", "as research.yaml asks for")
    AgentRunner(load_task_file(path), None, None)


def test_research_names_missing_api_key(monkeypatch):
    from skyrl_agent.errors import ConfigError
    from skyrl_agent.runner import AgentRunner

    monkeypatch.delenv("GOOGLE_SEARCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="GOOGLE_SEARCH_KEY"):
        AgentRunner(load_task_file(EXAMPLES / "research" / "research.yaml"), None, None)


def call(name: str, parameter: str, value: str) -> str:
    return f"<function={name}>\n<parameter={parameter}>{value}</parameter>\n</function>"


def test_search_agent_runs_against_server(tmp_path, capsys):
    """Retriever, model server, task file, rows and script as a user has them; only the model is written by hand."""
    pytest.importorskip("bm25s", reason="needs skyrl-gym[retrieval]")
    from skyrl_agent.testing import byte_tokenizer
    from skyrl_gym.tools.retrieval import RetrievalServer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def answer(asked):
        if asked.method == "GET":
            return 404, "no list of models"
        prompt = tokenizer.decode(asked.body["prompt"], skip_special_tokens=False)
        has_found = "Doc 1(Title:" in prompt
        text = call("finish", "answer", "Anna") if has_found else call("local_search", "query", "who painted it")
        return 200, {"choices": [{"text": text, "finish_reason": "stop", "index": 0}], "usage": {}}

    rows = file_of(
        tmp_path / "nq.jsonl", *({"question": q, "answer": a} for q, a in (("who painted it", "Anna"), ("b?", "Bob")))
    )
    written("data/search-r1.py", tmp_path, "--input", rows, "--validation_share", 0.5)
    documents = [{"id": "1", "title": "Painting", "text": "Anna painted it."}]
    with RetrievalServer(documents) as retriever, web_server(answer) as model:
        text = (EXAMPLES / "search" / "search.yaml").read_text()
        text = text.replace("http://127.0.0.1:8000/retrieve", retriever.url).replace("http://127.0.0.1:8001", model.url)
        (tmp_path / "task.yaml").write_text(text)
        for name, reward in (("train", 1.0), ("validation", 0.0)):
            arguments = [tmp_path / "task.yaml", tmp_path / f"{name}.parquet", "--tokenizer", tmp_path / "tokenizer"]
            arguments += ["--output", tmp_path / f"{name}.jsonl"]
            load(EXAMPLES / "run_openai.py").main(list(map(str, arguments)))
            told = capsys.readouterr().out
            assert f"rollout_metrics/raw_reward: {reward:.3f}" in told
            assert "rollout_metrics/finish_tool_ratio: 1.000" in told
