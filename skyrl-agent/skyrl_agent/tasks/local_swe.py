"""Software tasks that carry their own files: fix or write code so that tests pass. No container, no network.

A row has (first name found; QuixBugs and Exercism rows are of this form):

| field | |
|---|---|
| `files` | {path: text} (or that as JSON): all files of the project, the tests too |
| `test_cmd` | run in the working directory; plain pytest commands are judged test by test |
| `edit_files`, `edit_file` | what may be changed; none: everything but tests and their settings |
| `problem_statement`, `instructions` | what to do; none: that there is a bug |
| `fail_to_pass`, `pass_to_pass` | names of tests that must pass; none: all |
| `test_seconds` | how long the tests may take |
| `solution` | {path: text}, or the text of the file to edit; never shown, tried by `python -m skyrl_agent.validate` |

Texts have no file mode: those that begin with `#!` can be executed.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from skyrl_agent.finish import NO_GIT_PATCH, get_ending
from skyrl_agent.runtimes.base import Limits, Runtime, RuntimeSpec
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.tasks.changes import Changes, read_changes, to_result
from skyrl_agent.tasks.rows import from_json, get_first, parse_names, remove_nulls
from skyrl_agent.tasks.tests_run import CollectionError, TestRun, check_pytest, parse_pytest_arguments, run_tests
from skyrl_agent.types import JsonObject, Message, TrajectoryResult
from skyrl_gym.sandbox.workspace import split_path

MEBIBYTE = 1 << 20
SETTINGS = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
SETTINGS |= {"pyproject.toml"}
"""Files that change how tests run."""

SYSTEM = """You are a software engineer at a shell. Work in small steps: look, change, check, and finish when you are \
sure. Your working directory holds the project."""
USER = """{statement}

{where}
The check is this command, run on your files in a fresh copy of the project: `{test_cmd}`
Tests and their settings are taken from the original project, so changing them has no effect. There is no network.
When the work is done, call the finish tool."""
BUG = "A function in this project does not do what its description says. Find the mistake and correct it."


@dataclass(frozen=True)
class Problem:
    """A row, read."""

    files: dict[str, str]
    test_cmd: str
    edit_files: tuple[str, ...]
    statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_seconds: float | None
    solution: dict[str, str] | None

    def is_editable(self, path: str) -> bool:
        """Return whether the agent's version of a file is evaluated: new files are, except tests and their
        configuration.
        """
        if self.edit_files and path in self.files:
            return path in self.edit_files
        return not is_test_file(path)

    def is_agents_matter(self, error: CollectionError) -> bool:
        """Return whether an agent could remove a collection error: not where a test file is no Python, or where a
        module is missing that neither the project has nor the problem statement speaks of."""
        if error.module is not None:
            name = error.module.partition(".")[0]
            has_it = any(PurePosixPath(part).stem == name for path in self.files for part in PurePosixPath(path).parts)
            return has_it or f"{name}.py" in self.statement or f"{name}/" in self.statement
        return error.error != "SyntaxError" or error.file is None or self.is_editable(error.file)


def is_test_file(path: str) -> bool:
    """Return whether a path is, by its name, a test, a test folder or a pytest configuration."""
    *folders, name = PurePosixPath(path).parts
    stem = name.removesuffix(".py")
    is_test = name.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test"))
    return name in SETTINGS or is_test or any(folder in ("test", "tests") for folder in folders)


def read_problem(instance: Instance) -> Problem:
    """
    Raises:
        TaskRowError: a field is missing or invalid.
    """
    row = instance.row

    def wrong(field: str, rule: str) -> TaskRowError:
        return TaskRowError(f"LocalSWETask, row {instance.instance_id}: {field} {rule}; got {row.get(field)!r:.200}")

    files = from_json(row.get("files"))
    if not isinstance(files, Mapping) or not files:
        raise wrong("files", "must map at least one path to text")
    files = remove_nulls(files)
    for path, text in files.items():
        try:
            split_path(path)
        except ValueError as error:
            raise wrong("files", f"has a path that is not relative to the working directory ({error})") from None
        if not isinstance(text, str):
            raise wrong("files", f"must have text for {path!r}")
    if not isinstance(row.get("test_cmd"), str) or not row["test_cmd"].strip():
        raise wrong("test_cmd", "must be the command that runs the tests")
    fail_to_pass = parse_names(get_first(row, "fail_to_pass", "FAIL_TO_PASS"))
    pass_to_pass = parse_names(get_first(row, "pass_to_pass", "PASS_TO_PASS"))
    if (fail_to_pass or pass_to_pass) and parse_pytest_arguments(row["test_cmd"]) is None:
        raise wrong("test_cmd", "must be a plain pytest command where fail_to_pass or pass_to_pass name tests")
    edit_files = parse_names(get_first(row, "edit_files", "edit_file"))
    if unknown := [path for path in edit_files if path not in files]:
        raise TaskRowError(
            f"LocalSWETask, row {instance.instance_id}: edit_files names {unknown[0]!r}, which is not in files"
        )
    seconds = row.get("test_seconds")
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise wrong("test_seconds", "must be a positive number")
    return Problem(
        files=files,
        test_cmd=row["test_cmd"],
        edit_files=edit_files,
        statement=str(get_first(row, "problem_statement", "instructions") or BUG).strip(),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        test_seconds=seconds,
        solution=_parse_solution(row.get("solution"), edit_files),
    )


def _parse_solution(value: object, edit_files: tuple[str, ...]) -> dict[str, str] | None:
    """Return the solution's texts by path; None for a solution in an unsupported format."""
    if isinstance(value, str) and len(edit_files) == 1:
        return {edit_files[0]: value}
    value = from_json(value)
    if not isinstance(value, Mapping):
        return None
    texts = remove_nulls(value)
    return texts if texts and all(isinstance(text, str) for text in texts.values()) else None


class LocalSWETask(BaseTask):
    """Reward 1 if the tests pass with the agent's changes, else 0. Tests that do not run without those changes either
    give no reward but a failure (`error_evaluation`).

    Args:
        test_seconds: default timeout of the tests.
        command_seconds: the longest an agent's own command may take.
        memory_bytes: of the agent's commands and of the tests.
        show_tests: whether the agent sees the tests.
    """

    tools = ("bash", "str_replace_editor", "finish")

    def __init__(
        self,
        test_seconds: float = 60.0,
        command_seconds: float = 120.0,
        memory_bytes: int = 1024 * MEBIBYTE,
        show_tests: bool = True,
    ) -> None:
        self.test_seconds = test_seconds
        self.limits = Limits(wall_seconds=command_seconds, cpu_seconds=command_seconds, memory_bytes=memory_bytes)
        self.show_tests = show_tests

    def check_row(self, instance: Instance) -> None:
        read_problem(instance)

    async def probe_runtime(self, instance: Instance, runtime: Runtime) -> None:
        if parse_pytest_arguments(read_problem(instance).test_cmd) is not None:
            await check_pytest(runtime)

    def get_instruction(self, instance: Instance) -> list[Message]:
        problem = read_problem(instance)
        names = problem.edit_files or [path for path in problem.files if not is_test_file(path)]
        where = "Files to edit:\n" + "\n".join(f"- {path}" for path in names)
        text = USER.format(statement=problem.statement, where=where, test_cmd=problem.test_cmd)
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    def runtime_spec(self, instance: Instance) -> RuntimeSpec:
        files = read_problem(instance).files
        shown = {path: text for path, text in files.items() if self.show_tests or not is_test_file(path)}
        return self._build_spec(shown)

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: object) -> JsonObject:
        """Return `git_patch`, the gradable changes as a unified diff; `files`, the same as texts; and `left_out`."""
        problem = read_problem(instance)
        shown = {path: problem.files[path] for path in runtime.spec.files}
        changes = await read_changes(runtime, shown)
        changes = replace(changes, files={p: text for p, text in changes.files.items() if problem.is_editable(p)})
        return to_result(changes, problem.files) | {"answer": result}

    def evaluation_runtime_spec(self, instance: Instance) -> RuntimeSpec:
        return self._build_spec(read_problem(instance).files)

    def _build_spec(self, files: dict[str, str]) -> RuntimeSpec:
        scripts = [path for path, text in files.items() if text.startswith("#!")]
        setup = (shlex.join(["chmod", "+x", "--", *scripts]),) if scripts else ()
        return RuntimeSpec(files=files, setup=setup, limits=self.limits)

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        assert runtime is not None, "the caller must start evaluation_runtime_spec"
        problem = read_problem(instance)
        files = result["files"] if result else {}
        if not files:
            # A truncated agent had no time for a patch: its finish reason is kept.
            ended = get_ending(trajectory.finish_reason).trains
            return Judgement(0.0, {"resolved": 0.0}, NO_GIT_PATCH if ended else None)
        await put(runtime, files, result.get("executable", ()))
        return judge(problem, await self._run_tests(problem, runtime, untrusted=files))

    def solution(self, instance: Instance) -> JsonObject | None:
        problem = read_problem(instance)
        return problem.solution and to_result(Changes(dict(problem.solution)), problem.files)

    async def evaluate_original(self, instance: Instance, runtime: Runtime) -> Judgement:
        problem = read_problem(instance)
        run = await self._run_tests(problem, runtime)
        not_run = find_tests_not_run(run, [*problem.fail_to_pass, *problem.pass_to_pass])
        theirs = {f"collection of {name}" for name, why in run.not_collected.items() if problem.is_agents_matter(why)}
        if run.missing_program and PurePosixPath(run.missing_program).name in problem.statement:
            theirs |= {*run.obstacles}
        not_run = {name: why for name, why in not_run.items() if name not in theirs}
        return replace(judge(problem, run), not_run=not_run)

    async def _run_tests(self, problem: Problem, runtime: Runtime, untrusted: Collection[str] = ()) -> TestRun:
        seconds = problem.test_seconds or self.test_seconds
        limits = replace(self.limits, wall_seconds=seconds, cpu_seconds=seconds)
        return await run_tests(runtime, problem.test_cmd, limits, untrusted)


async def put(runtime: Runtime, files: Mapping[str, str | None], executable: Sequence[str] = ()) -> None:
    """Write and delete files of the working directory, and make some of them executable."""
    if deleted := [path for path, text in files.items() if text is None]:
        await runtime.exec(["rm", "-f", "--", *deleted])
    for path, text in files.items():
        if text is not None:
            with suppress(ValueError):  # created below a path that is a file in the original
                await runtime.write(path, text)
    if executable:
        await runtime.exec(["chmod", "+x", "--", *executable])


def judge(problem: Problem, run: TestRun) -> Judgement:
    """Grade a test run by all of its tests, or by the tests named in the row."""
    parts = {"tests_passed": run.fraction, "timed_out": float(run.timed_out)}
    resolved = run.passed
    named = {"fail_to_pass": problem.fail_to_pass, "pass_to_pass": problem.pass_to_pass}
    for part, names in named.items():
        if names:
            parts[part] = sum(run.tests.get(name) == "passed" for name in names) / len(names)
    if any(named.values()):
        resolved = all(parts[part] == 1.0 for part, names in named.items() if names)
    names = [*problem.fail_to_pass, *problem.pass_to_pass]
    is_settled = resolved or any(run.outcome(name) == "failed" for name in names or run.tests)
    not_run = {} if is_settled else find_tests_not_run(run, names)
    return Judgement(float(resolved), {"resolved": float(resolved), **parts}, not_run=not_run)


def find_tests_not_run(run: TestRun, named: Sequence[str]) -> dict[str, str]:
    """Return why tests were not run, as of `TestRun.obstacles`, among that names of tests that do not exist.

    Args:
        named: tests that count.
    """
    # Code under test can make a process hang or exit early, so neither is evidence about the command.
    if run.timed_out or run.obstacles or not run.tests:
        return {} if run.timed_out else run.obstacles
    return {
        f"test {name}": "it is skipped" if outcome else "there is no test of that name"
        for name in named
        if (outcome := run.outcome(name)) not in ("passed", "failed")
    }
