"""Terminal tasks: each way to be judged, and the rows of two benchmarks."""

import pytest

from skyrl_agent.errors import InfraError, TaskRowError
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.terminal import TerminalTask
from skyrl_agent.tasks.terminal_rows import agentbench_os_row, nl2bash_row

COUNT = {"query": "How many .txt files are there?", "setup": ["mkdir -p a/b", "touch a/1.txt a/b/2.txt"]}


@pytest.mark.parametrize("answer, reward", [("2", 1.0), (" 2 \n", 1.0), ("3", 0.0), ("", 0.0)])
async def test_expected_output_determines_reward(play, answer, reward):
    _, judgement = await play(TerminalTask(), COUNT | {"expected_output": "2\n"}, answer=answer)
    assert judgement.reward == reward


async def test_checks_run_in_agent_runtime(play):
    python = "import sys; sys.exit(sys.argv[1] != 'done' or sys.argv[2] != '2')"
    checks = ["test ! -e a/1.txt; echo 2", {"language": "python", "code": python}]
    row = COUNT | {"check": checks}
    assert (await play(TerminalTask(), row, "rm a/1.txt", "done"))[1].reward == 1.0
    assert (await play(TerminalTask(), row, "rm a/1.txt", "what?"))[1].reward == 0.0
    row = COUNT | {"check": "test ! -e a/1.txt"}
    assert (await play(TerminalTask(), row, "", "done"))[1].reward == 0.0


@pytest.mark.parametrize(
    "answer, parts",
    [
        ("find . -name '*.txt' | wc -l; rm a/1.txt", {"is_same_output": 1.0, "same_files": 1.0}),
        ("rm a/1.txt; echo 2", {"is_same_output": 1.0, "same_files": 1.0}),
        ("echo 2", {"is_same_output": 1.0, "same_files": 0.0}),
        ("rm a/1.txt", {"is_same_output": 0.0, "same_files": 1.0}),
        ("rm -r .; exit 1", {"is_same_output": 0.0, "same_files": 0.0}),
        ("chmod +x a/b/2.txt; rm a/1.txt; echo 2", {"is_same_output": 1.0, "same_files": 0.0}),
        ("", {"is_same_output": 0.0, "same_files": 0.0}),
    ],
)
async def test_commands_are_compared_by_effect(play, answer, parts):
    row = COUNT | {"gold": "find . -name '*.txt' | wc -l; rm a/1.txt"}
    _, judgement = await play(TerminalTask(), row, "rm -r a", answer)
    assert judgement.parts == parts
    assert judgement.reward == float(all(parts.values()))


async def test_setup_failure_is_not_agent_failure(play):
    with pytest.raises(InfraError, match="return code 3, 'no'"):
        await play(TerminalTask(), COUNT | {"setup": "echo no; exit 3", "check": "true"})


@pytest.mark.parametrize(
    "row, message",
    [
        ({"query": "x"}, "expected_output"),
        ({"query": "x", "gold": "y", "check": "z"}, "got gold, check"),
        ({"gold": "y"}, "instruction"),
        (
            {"query": "x", "check": {"language": "c++", "code": ""}},
            r"language must be one of bash, python; got 'c\+\+'",
        ),
        ({"query": "x", "check": "y", "files": [1]}, "files must map"),
    ],
)
def test_invalid_rows_are_rejected(row, message):
    with pytest.raises(TaskRowError, match=message):
        TerminalTask().check_row(Instance(row, "7"))


def nl2bash(rows):
    setups = {row["fs"]: row["setup"] for row in rows("agent_envs/nl2bash_setups")}
    return [nl2bash_row(task, setups) for task in rows("agent_envs/nl2bash_tasks") if task["verified"]]


@pytest.mark.slow
async def test_nl2bash_sample_is_solvable(play, rows):
    for row in nl2bash(rows)[::24]:
        assert (await play(TerminalTask(), row, answer=row["gold"]))[1].reward == 1.0, row
        assert (await play(TerminalTask(), row, answer="echo no"))[1].reward == 0.0, row


def test_agentbench_rows_are_built(rows):
    made = []
    for task in rows("agent_envs/agentbench_os"):
        try:
            row = agentbench_os_row(task)
        except ValueError:
            continue
        TerminalTask().check_row(Instance(row, row["instance_id"]))
        made.append(row)
    assert len(made) >= 150


async def test_agentbench_sample_is_solvable(play, rows):
    """Two whose files are in the working directory; what the example script prints is the answer."""
    tasks = {task["id"]: task for task in rows("agent_envs/agentbench_os")}
    for name in ("os-7-bootstrap-16", "os-7-bootstrap-64"):
        row, example = agentbench_os_row(tasks[name]), tasks[name]["evaluation"]["example"]
        assert (await play(TerminalTask(), row, example))[1].reward == 1.0
        assert (await play(TerminalTask(), row, answer="no number"))[1].reward == 0.0


@pytest.mark.full
async def test_nl2bash_and_agentbench_are_solvable(play, rows):
    """Counts of rows that the reference answer solves, and a wrong answer does not, in a sandbox without root and
    network.
    """

    async def fits(row, script, answer):
        try:
            right = (await play(TerminalTask(), row, script, answer))[1].reward
            return right == 1.0 and (await play(TerminalTask(), row, answer="echo no"))[1].reward == 0.0
        except InfraError:
            return False

    commands = [await fits(row, "", row["gold"]) for row in nl2bash(rows)]
    assert len(commands) == 144
    assert sum(commands) >= 140
    systems = []
    for task in rows("agent_envs/agentbench_os"):
        try:
            row, example = agentbench_os_row(task), task["evaluation"].get("example") or "true"
        except ValueError:
            continue
        code = example if isinstance(example, str) else example.get("code", "true")
        systems.append(await fits(row, code, row.get("expected_output")))
    assert sum(systems) >= 100
