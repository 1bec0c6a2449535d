"""Tasks at a shell: find something out, or change something.

A row has an instruction (`instruction`, `query` or `description`), what the working directory holds at first, and one
way to be judged:

- `files`: {path: text}
- `setup`: shell script, or a list of them, run in the working directory before the agent
- `expected_output`: the answer, but for white space at the ends of lines
- `check`: script or list of scripts (text: bash; or {language: bash or python, code}), run where the agent worked,
  after it. Each gets as arguments the answer and what those before it printed, and must exit with 0
- `gold`: a command. The agent answers with a command too, and both are run on the files as they were at first: they
  must print the same and leave the same files
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Limits, Runtime, RuntimeSpec
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.tasks.rows import from_json, get_first, remove_nulls
from skyrl_agent.tasks.tests_run import find_missing_program, find_obstacles
from skyrl_agent.types import JsonObject, Message, Row, TrajectoryResult

LANGUAGES = ("bash", "python")
SYSTEM = "You work at a shell, in small steps: run a command, read what it says, go on. There is no network."
ANSWERS = {
    "gold": "Finish with the command itself as the answer: one line of bash that does it, run on the directory as you "
    "found it. What it prints and the files it leaves count.",
    "expected_output": "Finish with the answer alone: no explanation.",
    "check": "Finish when it is done; if something was asked, with the answer alone.",
}

# Runs in the runtime: prints the state of all files in one line, without their times.
STATE = """
import hashlib, os, stat
whole = hashlib.sha256()
for folder, folders, names in os.walk("."):
    folders.sort()
    for name in sorted(folders + names):
        path = os.path.join(folder, name)
        about = os.lstat(path)
        content = ""
        if stat.S_ISLNK(about.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(about.st_mode):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
        whole.update(repr((path, oct(about.st_mode), content)).encode())
print(whole.hexdigest())
"""


@dataclass(frozen=True)
class Script:
    """Script of a row in one of two languages."""

    code: str
    language: str = "bash"

    def command(self, python: str, *arguments: str) -> list[str]:
        """Return the command that runs it."""
        if self.language == "python":
            return [python, "-c", self.code, *arguments]
        return ["bash", "-c", self.code, "bash", *arguments]


class TerminalTask(BaseTask):
    """Task with reward 1 if the row's check succeeds, else 0.

    Args:
        command_seconds: timeout of each command, of the agent and of grading.
        memory_bytes: of each.
    """

    tools = ("bash", "finish")

    def __init__(self, command_seconds: float = 60.0, memory_bytes: int = 1 << 30) -> None:
        self.limits = Limits(wall_seconds=command_seconds, cpu_seconds=command_seconds, memory_bytes=memory_bytes)

    def check_row(self, instance: Instance) -> None:
        row = instance.row
        if not _get_instruction(row):
            raise TaskRowError(f"TerminalTask, row {instance.instance_id}: instruction must not be empty")
        if not isinstance(from_json(row.get("files") or {}), Mapping):
            raise TaskRowError(f"TerminalTask, row {instance.instance_id}: files must map paths to texts")
        judges = [field for field in ANSWERS if row.get(field) is not None]
        if len(judges) != 1:
            raise TaskRowError(
                f"TerminalTask, row {instance.instance_id}: one of {', '.join(ANSWERS)} is required to grade the row; "
                f"got {', '.join(judges) or 'none'}"
            )
        for script in [*scripts(row.get("setup")), *scripts(row.get("check"))]:
            if script.language not in LANGUAGES:
                raise TaskRowError(
                    f"TerminalTask, row {instance.instance_id}: language must be one of {', '.join(LANGUAGES)}; "
                    f"got {script.language!r}"
                )

    def get_instruction(self, instance: Instance) -> list[Message]:
        how = next(text for field, text in ANSWERS.items() if instance.row.get(field) is not None)
        text = f"{_get_instruction(instance.row)}\n\n{how}"
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

    def runtime_spec(self, instance: Instance) -> RuntimeSpec:
        files = remove_nulls(from_json(instance.row.get("files") or {}))
        return RuntimeSpec(files=files, limits=self.limits)

    async def initialize_runtime(self, instance: Instance, runtime: Runtime) -> None:
        for script in scripts(instance.row.get("setup")):
            done = await runtime.exec(script.command(runtime.python))
            if not done.ok:
                raise InfraError(
                    f"row {instance.instance_id}: setup failed: {done.outcome}, return code {done.returncode}, "
                    f"{(done.stderr or done.stdout).strip()[-300:]!r}"
                )

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: object) -> JsonObject:
        answer = "" if result is None else str(result)
        if instance.row.get("check") is None:
            return {"answer": answer}
        arguments = [answer]
        for script in scripts(instance.row["check"]):
            done = await runtime.exec(script.command(runtime.python, *arguments))
            if not done.ok:
                return {"answer": answer, "passed": False, "not_run": find_obstacles(done, script.code)}
            arguments.append(done.stdout.rstrip("\n"))
        return {"answer": answer, "passed": True}

    def evaluation_runtime_spec(self, instance: Instance) -> RuntimeSpec | None:
        return self.runtime_spec(instance) if instance.row.get("gold") is not None else None

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement:
        row, result = instance.row, result or {"answer": ""}
        if row.get("check") is not None:
            return Judgement(float(result.get("passed", False)), not_run=result.get("not_run", {}))
        if row.get("expected_output") is not None:
            return Judgement(
                float(_split_lines(result["answer"].strip()) == _split_lines(str(row["expected_output"]).strip()))
            )
        assert runtime is not None, "the caller must start evaluation_runtime_spec"
        await self.initialize_runtime(instance, runtime)
        kept = f"/tmp/{secrets.token_hex(8)}"
        await _run(runtime, f"cp -a . {kept}")  # repeating the setup would give other times
        wanted = await self._run_for_effect(runtime, row["gold"], f"TerminalTask, row {instance.instance_id}: gold")
        await _run(runtime, f"find . -mindepth 1 -delete; cp -a {kept}/. . && rm -rf {kept}")
        found = await self._run_for_effect(runtime, result["answer"])
        parts = {
            part: float(one == other)
            for part, one, other in zip(("is_same_output", "same_files"), wanted, found, strict=True)
        }
        return Judgement(float(all(parts.values())), parts)

    def solution(self, instance: Instance) -> JsonObject | None:
        """Return the expected response; None if a script checks the result."""
        answer = get_first(instance.row, "gold", "expected_output")
        return None if answer is None else {"answer": str(answer)}

    async def evaluate_original(self, instance: Instance, runtime: Runtime) -> Judgement:
        if instance.row.get("check") is None:
            return await self.evaluate_result({"answer": ":"}, instance, TrajectoryResult(), runtime)
        await self.initialize_runtime(instance, runtime)
        result = await self.complete_runtime(instance, runtime, None)
        program = find_missing_program(result.get("not_run", {}))
        if program is not None and ("/" in program or program in _get_instruction(instance.row)):
            result["not_run"] = {}  # the agent was asked to create it
        return await self.evaluate_result(result, instance, TrajectoryResult(), runtime)

    async def _run_for_effect(self, runtime: Runtime, command: str, name: str = "") -> tuple[list[str], str]:
        """Run a command. Returns its output, and the state of the files after it.

        Raises:
            TaskRowError: a command with a name, which is the row's, could not be started.
        """
        done = await runtime.exec(command)
        if name and (not_run := find_obstacles(done, command)):
            raise TaskRowError(f"{name} did not run: {not_run}; got {command!r:.200}")
        state = await runtime.exec([runtime.python, "-I", "-c", STATE])
        return _split_lines(done.stdout), state.stdout if state.ok else f"unreadable: {state.stderr}"


async def _run(runtime: Runtime, command: str) -> None:
    done = await runtime.exec(command)
    if not done.ok:
        raise InfraError(f"{command!r} failed: {done.outcome}, {done.stderr.strip()[-300:]!r}")


def scripts(value: Any) -> list[Script]:
    """Read the scripts of a row's field: none, one or several, as text or with their language."""
    value = from_json(value)
    if value is None:
        return []
    if isinstance(value, str | Mapping):
        value = [value]
    return [
        Script(one) if isinstance(one, str) else Script(one["code"], one.get("language") or "bash") for one in value
    ]


def _get_instruction(row: Row) -> str:
    return str(row.get("instruction") or row.get("query") or row.get("description") or "").strip()


def _split_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
