"""The questions of Spider (https://yale-lily.github.io/spider) through `text2sql`, with their real databases."""

import gzip
import hashlib
import json
import tarfile
from collections import Counter, defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.graders.results import reward_of
from skyrl_gym.graders.sql import grade_sql
from skyrl_gym.sandbox.sqlite import read_rows

Question = dict[str, Any]


@pytest.fixture(scope="module")
def db_path(test_data, tmp_path_factory) -> Path:
    """The databases, unpacked once, and where `text2sql` looks for Spider's."""
    folder = tmp_path_factory.mktemp("spider")
    with tarfile.open(test_data / "sql_spider" / "databases.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder)
    (folder / "spider").mkdir()
    (folder / "spider" / "database").symlink_to(folder / "databases" / "spider")
    return folder


@pytest.fixture(scope="module")
def questions(test_data) -> list[Question]:
    """Those whose gold query finds something: 923 of dev and 5,977 of train."""
    found = []
    for name in ("dev", "train"):
        with gzip.open(test_data / "sql_spider" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines]
    return [question for question in found if question["n_rows"] > 0]


def reward(db_path: Path, question: Question, predicted: str) -> float:
    row = {
        "db_id": question["db_id"],
        "data": "spider",
        "reward_spec": {"method": "rule", "ground_truth": question["query"]},
    }
    env = skyrl_gym.make("text2sql", env_config={"db_path": str(db_path)}, extras=row)
    output = env.step(f"<think>I know.</think><solution>{predicted}</solution>")
    assert output["done"]
    return output["reward"]


def result_sha1(db_file: Path, query: str) -> str:
    """Hash a query's result as the data set records it."""
    rows = sorted(map(repr, read_rows(str(db_file), query)))
    return hashlib.sha1("\n".join(rows).encode()).hexdigest()[:16]


def check(db_path: Path, questions: list[Question]) -> int:
    """Every question: its own gold query is right; a broken one, an empty one and another question's are wrong.

    Returns how many questions had another on the same database with a different result.
    """
    num_compared = 0
    by_database = groupby(sorted(questions, key=lambda question: question["db_id"]), lambda question: question["db_id"])
    for _, group in by_database:
        results: defaultdict[frozenset, list[Question]] = defaultdict(list)  # 12 and 12.0 are one result
        for question in group:
            db_file = db_path / "databases" / question["db_path"]
            assert result_sha1(db_file, question["query"]) == question["result_sha1"], question["id"]
            results[frozenset(read_rows(str(db_file), question["query"]))].append(question)
        different = list(results.values())
        for index, same in enumerate(different):
            other = different[(index + 1) % len(different)][0]
            for question in same:
                assert reward(db_path, question, question["query"]) == 1.0, question["id"]
                assert reward(db_path, question, question["query"] + " WHERE )") == 0.0, question["id"]
                assert reward(db_path, question, f"SELECT * FROM ({question['query'].rstrip(' ;')}) WHERE 0") == 0.0
                if len(different) > 1:
                    assert reward(db_path, question, other["query"]) == 0.0, (question["id"], other["id"])
                    num_compared += 1
    return num_compared


def sample(questions: list[Question]) -> list[Question]:
    return sorted(questions, key=lambda question: hashlib.sha1(question["id"].encode()).digest())[:150]


def test_spider_sample_is_graded_correctly(db_path, questions):
    assert len(questions) == 6900
    assert check(db_path, sample(questions)) > 75


@pytest.mark.full
def test_all_of_spider_is_graded_right(db_path, questions):
    assert check(db_path, questions) > 6800


def check_rules(db_path: Path, questions: list[Question]) -> Counter[str]:
    """Every question with its columns turned round, and with each row twice, by both rules. Counts the former's."""
    rewards: Counter[str] = Counter()
    for question in questions:
        db_file = str(db_path / "databases" / question["db_path"])
        gold, columns = question["query"].rstrip(" ;"), [f"c{number}" for number in range(question["n_cols"])]
        rows = list(read_rows(db_file, gold))
        turned = f"WITH gold({', '.join(columns)}) AS ({gold}) SELECT {', '.join(columns[::-1])} FROM gold"
        same_set = {row[::-1] for row in rows} == set(rows)
        assert reward_of(grade_sql(turned, gold, db_file)) == same_set, question["id"]
        assert reward_of(grade_sql(turned, gold, db_file, rule="spider")) == 1.0, question["id"]
        rewards["right by both" if same_set else "right by Spider's alone"] += 1
        twice = f"SELECT * FROM ({gold}) UNION ALL SELECT * FROM ({gold})"
        assert reward_of(grade_sql(twice, gold, db_file)) == 1.0, question["id"]
        assert reward_of(grade_sql(twice, gold, db_file, rule="spider")) == 0.0, question["id"]
    return rewards


def test_rules_differ_in_columns_and_repetition(db_path, questions):
    assert check_rules(db_path, sample(questions)) == {"right by both": 109, "right by Spider's alone": 41}


@pytest.mark.full
def test_rules_differ_in_columns_and_repetition_on_all_of_spider(db_path, questions):
    assert check_rules(db_path, questions).total() == 6900


def test_databases_are_unchanged(db_path, questions):
    files = {db_path / "databases" / question["db_path"] for question in questions[:100]}
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    check(db_path, questions[:20])
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files} == before
    assert all(entry.suffix == ".sqlite" for file in files for entry in file.parent.iterdir())
