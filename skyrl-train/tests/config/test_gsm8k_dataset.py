"""The GSM8K example's dataset builder: local files in, rows that the trainer reads out."""

import gzip
import importlib.util
import json
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from skyrl_train.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "examples" / "gsm8k" / "gsm8k_dataset.py"
REAL_DATA = Path(os.environ.get("SKYRL_TEST_DATA", REPOSITORY.parent / "shared" / "data")) / "gsm8k"

TRAIN = [
    {"question": "1 + 1?", "answer": "One and one.\n#### 2"},
    {"question": "1000 + 234?", "answer": "Add.\n#### 1,234"},
    {"question": "1 - 4?", "answer": "Below zero.\n#### -3"},
]
TEST = [{"question": "2 + 2?", "answer": "#### 4"}]


def build(*arguments: object) -> None:
    """Run the script's main program in this process."""
    spec = importlib.util.spec_from_file_location("gsm8k_dataset", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main([str(argument) for argument in arguments])


def json_lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_all_row_formats_become_training_rows(tmp_path):
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write(json_lines(TRAIN))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEST), tmp_path / "test.parquet")
    (tmp_path / "other.jsonl").write_text("not read: the name holds no split")
    build("--output_dir", tmp_path / "out", "--input", tmp_path, "--max_train_dataset_length", 2)
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_spec"] for row in rows] == [
        {"ground_truth": "2", "method": "rule"},
        {"ground_truth": "1234", "method": "rule"},
    ]
    assert rows[0]["env_class"] == "gsm8k" and rows[0]["data_source"] == "openai/gsm8k"
    assert rows[0]["prompt"][0]["role"] == "user"
    assert rows[0]["prompt"][0]["content"].startswith("1 + 1? ") and "####" in rows[0]["prompt"][0]["content"]
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, **TRAIN[1]}
    validation = pyarrow.parquet.read_table(tmp_path / "out" / "validation.parquet").to_pylist()
    assert [row["reward_spec"]["ground_truth"] for row in validation] == ["4"]
    assert validation[0]["extra_info"]["split"] == "test"


def test_files_can_be_passed_individually(tmp_path, capsys):
    (tmp_path / "my_train.jsonl").write_text(json_lines(TRAIN))
    (tmp_path / "validation.jsonl").write_text(json_lines(TEST))
    build("--output_dir", tmp_path, "--input", tmp_path / "my_train.jsonl", tmp_path / "validation.jsonl")
    printed = capsys.readouterr().out
    assert "3 problems" in printed and "1 problems" in printed


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("train.jsonl", json_lines([{"problem": "1?", "answer": "#### 1"}]), "has no column 'question'"),
        ("train.jsonl", json_lines([{"question": "1?", "answer": "one"}]), 'must end with "#### number"'),
        ("train.jsonl", json_lines(TRAIN), "there are no test problems"),
        ("data.jsonl", json_lines(TRAIN), "must hold train, test or validation"),
        ("train.csv", "question,answer", "no train.* or test.*"),
    ],
)
def test_unusable_input_is_rejected(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(message)):
        build("--output_dir", tmp_path / "out", "--input", tmp_path / name)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no gsm8k folder below SKYRL_TEST_DATA")
def test_published_dataset_is_read_completely(tmp_path):
    build("--output_dir", tmp_path, "--input", REAL_DATA)
    with gzip.open(REAL_DATA / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        published = [json.loads(line)["final"] for line in lines]
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["reward_spec"]["ground_truth"] for row in rows] == published
    assert pyarrow.parquet.read_metadata(tmp_path / "validation.parquet").num_rows == 1319
