"""Errors that a user can mend end the command at once: exit code 1, one text with the remedy, no traceback."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

QUESTION = [{"role": "user", "content": "1+1="}]
LONG_QUESTION = [{"role": "user", "content": "1" + "+1" * 60}]


@pytest.mark.parametrize(
    "column, content, setting, expected",
    [
        pytest.param(
            "prompt",
            QUESTION,
            "trainer.policy_mini_batch_size=3",
            "ConfigError: trainer.train_batch_size 4 should be divisible by policy_mini_batch_size 3",
            marks=pytest.mark.full,
        ),
        (
            "prompt",
            QUESTION,
            "environment.env_class=arithmetik",
            "ConfigError: environment.env_class: environment 'arithmetik' is not registered; did you mean arithmetic?",
        ),
        pytest.param(
            "question",
            QUESTION,
            "trainer.seed=1",
            "rows.parquet: row 0 has no column 'prompt'; it has question",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "prompt",
            LONG_QUESTION,
            "trainer.seed=1",
            "exceed trainer.max_prompt_length=40 tokens",
            marks=pytest.mark.full,
        ),
        ("prompt", QUESTION, "trainer.policy.model.path=/nowhere", "model.path=/nowhere: no such folder"),
        pytest.param(
            "prompt",
            QUESTION,
            "trainer.run_dir=/dev/null/run",
            "trainer.run_dir=/dev/null/run cannot be written: ",
            marks=pytest.mark.full,
        ),
    ],
    ids=["batch size", "environment", "column", "length", "model path", "run folder"],
)
def test_impossible_command_is_refused(
    chat_model: str, tmp_path: Path, column: str, content: Any, setting: str, expected: str
):
    data = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{column: content}] * 4), data)
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", f"trainer.policy.model.path={chat_model}"]
    command += [f"data.train_data=[{data}]", "data.val_data=[]", f"trainer.run_dir={tmp_path / 'run'}"]
    command += ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "trainer.max_prompt_length=40"]
    command += ["environment.env_class=multiply", "generator.sampling_params.max_generate_length=16"]
    command += ["generator.eval_sampling_params.max_generate_length=16", setting]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=dict(os.environ))
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert expected in said
    assert "Traceback" not in said
    assert "Started a local Ray instance" not in said
    assert len(said.splitlines()) < 12, said
