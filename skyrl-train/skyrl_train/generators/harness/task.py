"""One task of a harness: the inputs of a program or function, and the reward of the resulting workspace."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_gym.envs.base_text_env import text_of
from skyrl_gym.error import TaskError
from skyrl_gym.graders import reward_of
from skyrl_gym.graders.code import CodeSettings, grade_code, parse_tests
from skyrl_gym.sandbox import ExecResult, Limits, Sandbox
from skyrl_gym.sandbox.command import as_bytes
from skyrl_gym.sandbox.workspace import split_path
from skyrl_train.errors import RolloutError
from skyrl_train.types import ConversationType

TASK_FOLDER = "/task"
"""Path of a task's texts inside of a sandbox."""
MAX_WORD_BYTES = (128 << 10) - 1
"""Bytes of one word of a command line, or of one variable with its name, beyond which Linux starts nothing."""
NOT_RUNNABLE = (126, 127)
"""Exit statuses of shells for a command that cannot be run or does not exist."""


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """A dataset row, the endpoint and the workspace, as passed to a function or a grader."""

    prompt: ConversationType
    """The row's messages."""
    row: Mapping[str, Any]
    """The row's other columns."""
    base_url: str
    """Base URL of this trajectory's requests, with `/v1`."""
    api_key: str
    model: str
    sandbox: Sandbox
    """Workspace, in which commands run without network: `read`, `write`, `exec`."""
    deadline_seconds: float
    folder: str = TASK_FOLDER
    """Folder with `task.txt` and `messages.json`, as the program sees it: texts of any length."""

    @property
    def text(self) -> str:
        """Text of the last message of the prompt."""
        return get_last_text(self.prompt)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command, including the variables read by the SDKs of OpenAI and
        Anthropic. A text too long for a variable is only in its file."""
        texts = {"SKYRL_TASK": self.text, "SKYRL_MESSAGES": json.dumps(self.prompt)}
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "SKYRL_MODEL": self.model,
            "SKYRL_TASK_FILE": f"{self.folder}/task.txt",
            "SKYRL_MESSAGES_FILE": f"{self.folder}/messages.json",
            **{name: text for name, text in texts.items() if _is_short_enough(f"{name}={text}")},
        }

    def write_texts(self, folder: str) -> None:
        """Write the texts of the task's folder, readable by the sandbox's user.

        Args:
            folder: path of the folder for this process.

        Raises:
            RolloutError: kind `environment`: the prompt has a value that JSON cannot represent.
        """
        try:
            check_prompt(self.prompt)
        except ValueError as error:
            raise RolloutError("environment", f"the row's {error}") from None
        texts = {"task.txt": as_bytes(self.text), "messages.json": json.dumps(self.prompt).encode()}
        for name, text in texts.items():
            path = Path(folder, name)
            path.write_bytes(text)
            path.chmod(0o644)  # whatever the umask: a container's user is none of this machine's
        os.chmod(folder, 0o755)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line with `{task}`, `{task_file}`, `{model}`, `{base_url}` and `{api_key}` filled in.

        Raises:
            ValueError: the task is too long for a command-line argument.
        """
        values = {
            "{task_file}": f"{self.folder}/task.txt",
            "{model}": self.model,
            "{base_url}": self.base_url,
            "{api_key}": self.api_key,
            "{task}": self.text,  # last: a task's own braces stay
        }
        check_task_fits(words, self.text)
        filled = []
        for word in words:
            for name, value in values.items():
                word = word.replace(name, value)
            filled.append(word)
        return filled


def get_last_text(prompt: ConversationType | None) -> str:
    """Return the text of the last message; for a message with typed parts, the concatenated texts."""
    return text_of(prompt[-1]) if prompt else ""


def check_prompt(prompt: ConversationType | None) -> None:
    """Check that a prompt can be passed to a harness as text and as JSON. Raises ValueError that names the location."""
    for place in _find_non_json_values(prompt, "prompt"):
        raise ValueError(
            f"{place} cannot be encoded as JSON, the format in which a harness receives its messages: convert "
            "it to a string or a number"
        )
    content = prompt[-1].get("content") if prompt else None
    if not isinstance(content, str | list | tuple | None):
        raise ValueError(
            f"prompt[{len(prompt or ()) - 1}].content must be text or a list of parts; got {content!r:.60}"
        )


def _find_non_json_values(value: object, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"the key {key!r:.60} in {place}" for key in value if not isinstance(key, str | int | float | None))
        for key, inner in value.items():
            yield from _find_non_json_values(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _find_non_json_values(inner, f"{place}[{number}]")
    elif not isinstance(value, str | int | float | None):
        yield f"{place} ({type(value).__name__} {value!r:.60})"


def check_task_fits(words: Sequence[str], text: str) -> None:
    """Check that `{task}` can be filled in. Raises ValueError with an alternative."""
    if any("{task}" in word and not _is_short_enough(word.replace("{task}", text)) for word in words):
        raise ValueError(
            f"the prompt's last message has {len(as_bytes(text))} bytes, too many for {{task}} in "
            f"generator.harness.command: the system's limit for an argument is {MAX_WORD_BYTES}. Pass the program "
            "{task_file}, the path of a file with it, or remove long rows"
        )


def _is_short_enough(word: str) -> bool:
    return len(as_bytes(word)) <= MAX_WORD_BYTES


def check_row(row: Mapping[str, Any], with_grade: bool) -> None:
    """Check the format of a row's `files`, and of its `grade` if that determines the reward.

    Raises:
        ValueError: names the column, the value and the expected format.
    """
    _check_files("files", row.get("files"))
    grade = row.get("grade")
    if not with_grade or not grade:
        return
    if not isinstance(grade, Mapping):
        raise ValueError(f"grade must be an object with command and files; got {str(grade)[:100]!r}")
    _check_files("grade.files", grade.get("files"))
    if (grade.get("program") is None) == (grade.get("command") is None):
        raise ValueError(
            "grade must have either program and tests (the agent's code runs separately from them) or command; got "
            f"{sorted(name for name, value in grade.items() if value is not None)}"
        )
    if grade.get("program") is not None:
        _check_tests(grade)
        return
    inputs = grade.get("inputs")
    if inputs is not None and (
        isinstance(inputs, str | Mapping)
        or not isinstance(inputs, Iterable)
        or not all(isinstance(path, str) for path in inputs)
    ):
        raise ValueError(f"grade.inputs must be a list of paths in the workspace; got {str(inputs)[:100]!r}")
    _check_path_conflicts(
        list(inputs or []), [path for path, text in (grade.get("files") or {}).items() if text is not None]
    )
    command = grade.get("command")
    if isinstance(command, str | Mapping) or not isinstance(command, Iterable) or not list(command):
        raise ValueError(
            "grade.command must be a list of arguments, such as ['python', 'check.py'] or ['sh', '-c', 'a shell "
            f"command']; got {str(command)[:100]!r}"
        )


def _check_tests(grade: Mapping[str, Any]) -> None:
    if not isinstance(grade["program"], str):
        raise ValueError(f"grade.program must be a path in the workspace; got {str(grade['program'])[:100]!r}")
    _check_path("grade.program", grade["program"])
    if any(text is not None for text in (grade.get("files") or {}).values()) or grade.get("inputs"):
        raise ValueError("grade.files and grade.inputs can be set only with grade.command, not with grade.program")
    try:
        parse_tests(grade.get("tests"))
    except TaskError as error:
        raise ValueError(f"grade.tests cannot be used: {error}") from error


def _check_files(column: str, files: object) -> None:
    if files is None:
        return
    if not isinstance(files, Mapping) or not all(isinstance(text, str | None) for text in files.values()):
        raise ValueError(f"{column} must be an object of paths and texts; got {str(files)[:100]!r}")
    for path in (path for path, text in files.items() if text is not None):
        _check_path(column, path)


def _check_path_conflicts(inputs: Sequence[str], files: Sequence[str]) -> None:
    """Check that no input path conflicts with a grader's file or folder; otherwise the agent could prevent that file
    from being written."""
    for path in inputs:
        given = _check_path("grade.inputs", path)
        for file in files:
            own = split_path(file)
            if given != own and given[: len(own)] == own[: len(given)]:
                raise ValueError(
                    f"grade.inputs must not contain, or be contained in, a path of grade.files; got {path!r} and "
                    f"{file!r}"
                )


def _check_path(column: str, path: object) -> list[str]:
    try:
        return split_path(str(path))
    except ValueError as error:
        raise ValueError(f"{column}: {error}; use a relative path, without '..'") from None


def write_files(sandbox: Sandbox, files: Mapping[str, str | None] | None) -> None:
    """Write the files of a row into the workspace. Rows of a table have the names of all rows: null entries do not
    belong to this row."""
    for path, content in (files or {}).items():
        if content is not None:
            sandbox.write(path, content)


NewSandbox = Callable[..., Sandbox]
"""Makes a sandbox, not started, with the given `limits`."""


def grade_workspace(task: HarnessTask, seconds: float, new_sandbox: NewSandbox) -> float:
    """Compute the reward of an agent's workspace by the row's `grade`. The agent is responsible for the workspace: a
    missing program, or a folder at the path of the grader's file, gives 0.

    Raises:
        RolloutError: kind `reward`: the row's command cannot be run.
        InfraError: a sandbox failed.
    """
    grade = task.row["grade"]
    if grade.get("program") is not None:
        return _grade_by_tests(task, grade, seconds, new_sandbox)
    limits = Limits(**{**vars(task.sandbox.limits), "wall_seconds": seconds, "cpu_seconds": seconds})
    if grade.get("inputs") is None:
        return _run_command(task.sandbox, grade, limits, is_fresh=False)
    with new_sandbox(limits=limits) as sandbox:
        for path in grade["inputs"]:
            if (content := _read_or_none(task.sandbox, path)) is not None:
                sandbox.write(path, content)
        return _run_command(sandbox, grade, limits, is_fresh=True)


def _grade_by_tests(task: HarnessTask, grade: Mapping[str, Any], seconds: float, new_sandbox: NewSandbox) -> float:
    """Run the program in a separate sandbox. Tests and expected values never enter that sandbox, so a program cannot
    read them, bypass them or report results for them."""
    content = _read_or_none(task.sandbox, grade["program"])
    if content is None:
        return 0.0
    settings = CodeSettings(case_seconds=seconds, total_seconds=seconds)
    code = content.decode(errors="replace")
    return reward_of(grade_code(code, parse_tests(grade["tests"]), settings, new_sandbox=new_sandbox))


def _read_or_none(sandbox: Sandbox, path: str) -> bytes | None:
    """Read a file of an agent's workspace; None if it is missing, a folder or link, unreadable, or too large."""
    try:
        return sandbox.read(path)
    except (OSError, ValueError):
        return None


def _run_command(sandbox: Sandbox, grade: Mapping[str, Any], limits: Limits, is_fresh: bool) -> float:
    """Write the grader's files over the workspace's files and run its command there: 1 if its exit status is 0, else 0
    (including a command ended by a limit, since hanging tests have failed)."""
    files = {path: text for path, text in (grade.get("files") or {}).items() if text is not None}
    if files and not is_fresh:
        # The agent may have left folders, links or full disks in their place. `write` says whether that helped.
        sandbox.exec(["rm", "-rf", "--", *files])
    try:
        write_files(sandbox, files)
    except (OSError, ValueError):
        if is_fresh:
            raise  # the row's own fault
        return 0.0
    result: ExecResult = sandbox.exec([str(word) for word in grade["command"]], limits=limits)
    if result.outcome == "exited" and result.returncode in NOT_RUNNABLE:
        raise RolloutError("reward", f"the row's grade.command cannot be run: {result.stderr.strip()[-300:]}")
    return float(result.ok)


def convert_reward(value: object, source: str) -> float:
    """Convert a reward to float. Raises RolloutError if it is not a finite number."""
    # Of NumPy, too: a comparison of arrays, a mean in float32.
    if isinstance(value, Real | np.bool_) and math.isfinite(value):
        return float(value)
    raise RolloutError("reward", f"{source} must return a finite number; got {value!r}")
