"""Task folders in the layouts of Harbor and Terminal-Bench, in a local sandbox."""

from pathlib import Path
from typing import get_args

import pytest

from skyrl_agent.errors import InfraError, TaskRowError
from skyrl_agent.runtimes import container, make_runtime
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.harbor import HarborTask, iter_harbor_rows
from skyrl_agent.types import TrajectoryResult
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.testing import needed_image

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
env = { WANTED = "%s" }
[agent]
timeout_sec = 60.0
[solution]
env = { ANSWER = "%s" }
[environment]
build_timeout_sec = 600.0
"""
DOCKERFILE = """
FROM debian:bookworm-slim
# comments and continued lines
ENV NUMBERS=/app/data/numbers.txt
WORKDIR /app
COPY numbers.txt data/
RUN mkdir -p logs && \\
    sort -n data/numbers.txt > logs/sorted.txt
"""
TEST = """#!/bin/bash
if [ "$(cat /app/answer.txt 2>/dev/null)" = "$WANTED" ] && [ -e /tests/helper.txt ]; then reward=1; else reward=0; fi
"""
REWARDS = (
    "echo $reward > /logs/verifier/reward.txt",
    'echo "{\\"reward\\": $reward, \\"files\\": $(ls /app | wc -l)}" > /logs/verifier/reward.json',
)
QUESTIONS = {
    "sum": "awk '{s+=$1} END {print s}' $NUMBERS",
    "largest": "tail -n 1 /app/logs/sorted.txt",
    "smallest": "head -n 1 /app/logs/sorted.txt",
    "count": "grep -c . $NUMBERS",
}
ANSWERS = {"sum": sum, "largest": max, "smallest": min, "count": len}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_tasks(folder: Path, size: int) -> None:
    """Write task folders: four questions over different numbers, every fifth one in Terminal-Bench's layout."""
    for number in range(size):
        question = list(QUESTIONS)[number % 4]
        numbers = [(number * 7 + step * 13) % 50 for step in range(3 + number % 5)]
        answer = str(ANSWERS[question](numbers))
        task = folder / f"{question}-{number:02d}"
        instruction = f"Write the {question} of the numbers in /app/data/numbers.txt to /app/answer.txt."
        lines = "".join(f"{value}\n" for value in numbers)
        if number % 5 == 4:
            write(task / "task.yaml", f"instruction: |-\n  {instruction}\nmax_test_timeout_sec: 60\n")
            write(task / "Dockerfile", DOCKERFILE)
            write(task / "numbers.txt", lines)
            write(task / "solution.sh", f"{QUESTIONS[question]} > /app/answer.txt\n")
            write(task / "run-tests.sh", f'[ "$(cat /app/answer.txt)" = {answer} ] && [ -e $TEST_DIR/helper.txt ]\n')
        else:
            write(task / "task.toml", TOML % (answer, answer))
            write(task / "instruction.md", f"{instruction}\n")
            write(task / "environment" / "Dockerfile", DOCKERFILE)
            write(task / "environment" / "numbers.txt", lines)
            write(task / "solution" / "solve.sh", f'[ "$ANSWER" ] && {QUESTIONS[question]} > /app/answer.txt\n')
            write(task / "tests" / "test.sh", TEST + REWARDS[number % 2])
        write(task / "tests" / "helper.txt", "")


async def judged(row, solve, **settings):
    """Return the reward of an oracle, or of an agent that does nothing."""
    task, instance = HarborTask(**settings), Instance(row, row["id"])
    async with make_runtime(task.runtime_spec(instance)) as runtime:
        if not solve:
            return (await task.evaluate_original(instance, runtime)).reward
        solution = task.solution(instance)
        return (await task.evaluate_result(solution, instance, TrajectoryResult(), runtime)).reward


@pytest.mark.parametrize("size", [5, pytest.param(20, marks=pytest.mark.full)])
async def test_harbor_oracle_passes_and_idle_agent_fails(sandboxed, tmp_path, size):
    make_tasks(tmp_path, size)
    rows = list(iter_harbor_rows(tmp_path))
    assert len(rows) == size and "Write the " in rows[0]["prompt"][1]["content"]
    assert [await judged(row, solve=True) for row in rows] == [1.0] * size
    assert [await judged(row, solve=False) for row in rows] == [0.0] * size


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("engine", get_args(EngineName))
async def test_harbor_tasks_run_in_containers_of_images(engine, tmp_path, monkeypatch):
    image = needed_image(engine)
    monkeypatch.setattr(container, "find_engine", lambda: engine)
    make_tasks(tmp_path, 20)
    for folder in tmp_path.iterdir():
        [file] = folder.rglob("Dockerfile")
        file.write_text(file.read_text().replace("debian:bookworm-slim", image))
    rows = list(iter_harbor_rows(tmp_path))
    assert HarborTask(containers=True).runtime_spec(Instance(rows[0], "a")).image == image
    assert [await judged(row, solve=True, containers=True) for row in rows] == [1.0] * 20
    assert [await judged(row, solve=False, containers=True) for row in rows] == [0.0] * 20


def test_harbor_image_comes_from_task_or_dockerfile(tmp_path):
    make_tasks(tmp_path, 1)
    [row] = iter_harbor_rows(tmp_path)
    task, instance = HarborTask(containers=True), Instance(row, "a")
    assert task.runtime_spec(instance).image == "debian:bookworm-slim"
    assert task.runtime_spec(instance).workdir == "/app"
    dockerfile = tmp_path / "sum-00" / "environment" / "Dockerfile"
    write(dockerfile, "ARG OS=debian\nARG TAG='12-slim'\nFROM ${OS}:$TAG\nARG OS=other\n")
    assert task.runtime_spec(instance).image == "debian:12-slim"
    write(dockerfile, "ARG TAG\nFROM debian:$TAG\n")
    with pytest.raises(TaskRowError, match=r"FROM debian:\$TAG"):
        task.check_row(instance)
    write(dockerfile, "FROM a AS b\nFROM c\n")
    with pytest.raises(TaskRowError, match=r"environment\.docker_image"):
        task.check_row(instance)
    toml = tmp_path / "sum-00" / "task.toml"
    write(toml, toml.read_text().replace("[environment]", '[environment]\ndocker_image = "built/already:1"'))
    spec = task.runtime_spec(instance)
    assert (spec.image, spec.workdir, spec.env) == ("built/already:1", None, {})


async def test_harbor_expands_dockerfile_variables_and_copies_files(sandboxed, tmp_path):
    make_tasks(tmp_path, 1)
    folder = tmp_path / "sum-00"
    long = "/".join(["d" * 120] * 6)
    dockerfile = (
        "ARG PLACE=data\nENV ROOT=/app\nENV PATH=$ROOT/bin:${PATH} EMPTY=$NOWHERE\nWORKDIR $ROOT\n"
        f"COPY many ${{PLACE}}/many\nRUN ls $PLACE/many/{long} | wc -l > count.txt"
    )
    write(folder / "environment" / "Dockerfile", dockerfile)
    for number in range(160):
        write(folder / "environment" / "many" / long / f"{number:0120}", "")
    checks = '[ -z "$EMPTY" ] && [ "${PATH%%:*}" = /app/bin ] && [ "$(cat /app/count.txt)" = 160 ]'
    write(folder / "tests" / "test.sh", f"{checks} && echo 1 > /logs/verifier/reward.txt")
    [row] = iter_harbor_rows(tmp_path)
    assert await judged(row, solve=False) == 1.0


async def test_harbor_grades_agent_work_and_ignores_forged_reward(play, tmp_path):
    make_tasks(tmp_path, 2)
    counted = next(row for row in iter_harbor_rows(tmp_path) if row["id"].startswith("largest"))
    script = "test ! -e /tests/test.sh && cd /app && tail -n 1 logs/sorted.txt > answer.txt"
    _, judgement = await play(HarborTask(), counted, script)
    assert judgement.parts == {"reward": 1.0, "files": 3.0}
    planted = "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 'exit 0' > /tests/test.sh"
    assert (await play(HarborTask(), counted, planted))[1].reward == 0.0


async def test_harbor_grader_without_reward_is_not_agent_failure(play, tmp_path):
    make_tasks(tmp_path, 1)
    (row,) = iter_harbor_rows(tmp_path)
    test = Path(row["path"]) / "tests" / "test.sh"
    write(test, "echo no pytest here >&2; exit 127")
    with pytest.raises(InfraError, match=r"return code 127.*no pytest"):
        await play(HarborTask(), row)
    write(test, 'echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json')
    with pytest.raises(InfraError, match="`reward`"):
        await play(HarborTask(), row)


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("task.toml", "[verifier", "TOMLDecodeError"),
        ("task.toml", "[[steps]]\nname = 'a'", "several .* are not supported"),
        ("task.toml", "[verifier]\nenv = { KEY = '${KEY}' }", "variable of the host"),
        ("instruction.md", " ", "has no instruction"),
        ("environment/Dockerfile", "COPY --from=build /a /b", "not supported in a sandbox"),
        ("environment/Dockerfile", 'RUN ["ls"]', "not supported in a sandbox"),
        ("environment/Dockerfile", "WORKDIR ${HOME:-/app}", "not supported in a sandbox"),
    ],
)
def test_harbor_reports_unusable_folders(tmp_path, file, text, message):
    make_tasks(tmp_path, 1)
    write(tmp_path / "sum-00" / file, text)
    with pytest.raises(TaskRowError, match=f"sum-00.*{message}"):
        list(iter_harbor_rows(tmp_path))
    with pytest.raises(TaskRowError, match=r"task\.toml"):
        list(iter_harbor_rows(tmp_path / "sum-00"))
