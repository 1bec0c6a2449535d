"""The examples of software and terminal tasks: rows that the tasks take, and a run of them."""

import json

import pytest

from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.local_swe import LocalSWETask
from skyrl_agent.tasks.terminal import TerminalTask

from ..example_scripts import EXAMPLES, load, written


def test_generated_programs_become_rows(tmp_path):
    rows = written("swe/swe_dataset.py", tmp_path)
    assert len(rows) == 4
    for row in rows:
        LocalSWETask().check_row(Instance(row, row["id"]))
        assert "solution" not in row


def test_published_programs_become_rows(tmp_path, test_data):
    path = test_data / "swe" / "exercism_python.jsonl.gz"
    rows = written("swe/swe_dataset.py", tmp_path, "--input", path, "--validation_share", 0.2)
    assert len(rows) == 137
    for row in rows:
        task, instance = LocalSWETask(), Instance(row, row["id"])
        task.check_row(instance)
        assert task.get_instruction(instance) == row["prompt"]


@pytest.mark.slow
def test_generated_programs_are_solved_by_solutions(sandboxed, tmp_path, capsys):
    output = tmp_path / "trajectories.jsonl"
    assert load(EXAMPLES / "swe" / "scripted_swe.py").main(["--output", str(output)]) == 0
    assert "4 of 4 solved" in capsys.readouterr().out
    assert len([json.loads(line) for line in output.read_text().splitlines()]) == 4


def test_terminal_rows_are_built(tmp_path, test_data):
    for row in written("terminal/terminal_dataset.py", tmp_path / "made"):
        TerminalTask().check_row(Instance(row, row["id"]))
    folder = test_data / "agent_envs"
    arguments = ("--input", folder / "nl2bash_tasks.jsonl.gz", "--validation_share", 0.2)
    setups = ("--nl2bash_setups", folder / "nl2bash_setups.jsonl.gz")
    rows = written("terminal/terminal_dataset.py", tmp_path / "nl2bash", *arguments, *setups)
    assert len(rows) == 144
    assert all(row["gold"] not in row["prompt"][-1]["content"] for row in rows)


async def test_generated_terminal_tasks_are_solvable(play, tmp_path):
    rows = load(EXAMPLES / "terminal" / "terminal_dataset.py").made_rows(3)
    question, change, command = rows
    assert (await play(TerminalTask(), question, "cat logs/* | grep -c error"))[1].reward == 1.0
    few = change["instruction"].split("fewer than ")[1].split()[0]
    delete = f"for f in logs/*; do [ $(grep -c error $f) -lt {few} ] && rm $f; done"
    assert (await play(TerminalTask(), change, delete))[1].reward == 1.0
    assert (await play(TerminalTask(), change, ""))[1].reward == 0.0
    other = "cd logs && for f in $(ls); do sed -n 1,5p $f | grep slow >/dev/null || echo $f; done"
    assert (await play(TerminalTask(), command, answer=other))[1].reward == 1.0
    assert (await play(TerminalTask(), command, answer="ls logs"))[1].reward == 0.0
