"""One task of a harness: what a program or a function is given, and the reward of what it left behind."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_gym.sandbox import ExecResult, Limits, Sandbox
from skyrl_train.errors import RolloutError
from skyrl_train.types import ConversationType

NOT_RUNNABLE = (126, 127)
"""Exit statuses of shells for a command that cannot be run or does not exist."""


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """A row of the dataset, the endpoint and the workspace, as a function or a grader gets them."""

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

    @property
    def text(self) -> str:
        """The last message of the prompt."""
        return str(self.prompt[-1]["content"]) if self.prompt else ""

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a command: those that the SDKs of OpenAI and Anthropic read, and ours."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "SKYRL_MODEL": self.model,
            "SKYRL_TASK": self.text,
            "SKYRL_MESSAGES": json.dumps(self.prompt),
        }

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line with `{task}`, `{model}`, `{base_url}`, `{api_key}` filled in."""
        values = {"{task}": self.text, "{model}": self.model, "{base_url}": self.base_url, "{api_key}": self.api_key}
        filled = []
        for word in words:
            for name, value in values.items():
                if name != "{task}":
                    word = word.replace(name, value)
            filled.append(word.replace("{task}", self.text))  # last: a task's own braces stay
        return filled


def write_files(sandbox: Sandbox, files: Mapping[str, str | None] | None) -> None:
    """Write files of a row into the workspace. A table's rows have all names of all rows: those that are null are not
    this row's."""
    for path, content in (files or {}).items():
        if content is not None:
            sandbox.write(path, content)


def grade_by_command(task: HarnessTask, seconds: float) -> float:
    """Write the files of the row's `grade` over those of the workspace and run its command there: 1 if its exit status
    is 0, else 0 (also where a limit ended it: tests that hang have failed).

    Raises:
        RolloutError: kind `reward`: there is no such command.
        InfraError: the sandbox failed.
    """
    grade = task.row["grade"]
    write_files(task.sandbox, grade.get("files"))
    limits = Limits(**{**vars(task.sandbox.limits), "wall_seconds": seconds, "cpu_seconds": seconds})
    result: ExecResult = task.sandbox.exec([str(word) for word in grade["command"]], limits=limits)
    if result.outcome == "exited" and result.returncode in NOT_RUNNABLE:
        raise RolloutError("reward", f"the row's grade.command cannot be run: {result.stderr.strip()[-300:]}")
    return float(result.ok)


def checked_reward(value: object, source: str) -> float:
    """Return a reward as a float. Raises RolloutError if it is no finite number."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise RolloutError("reward", f"{source} must return a finite number; got {value!r}")
