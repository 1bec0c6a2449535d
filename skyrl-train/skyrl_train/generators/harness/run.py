"""One attempt of a harness at a task: workspace, program or function, outcome, reward. Blocking; independent of the
trainer."""

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from skyrl_gym.deadline import DeadlineExceeded, call_before_deadline
from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import ExecResult, Limits, Sandbox, make_sandbox
from skyrl_train.errors import ConfigError, FailureKind, RolloutError
from skyrl_train.generators.harness.forwarder import NOT_STARTED, UNREACHABLE
from skyrl_train.generators.harness.task import (
    TASK_FOLDER,
    HarnessTask,
    check_row,
    convert_reward,
    grade_workspace,
    write_files,
)
from skyrl_train.rollouts.types import Failure
from skyrl_train.utils.import_path import import_object

if TYPE_CHECKING:
    from skyrl_train.config.harness import HarnessConfig
    from skyrl_train.endpoint.recorder import SessionRecord

SOCKET, PORT = "/endpoint.sock", 8000
"""Address of the endpoint inside of a sandbox: a Unix socket, and the port that leads to it."""
_FORWARDER = Path(__file__).with_name("forwarder.py").read_text()
_LAST_WORDS = 600
_PRINTED_CHARACTERS = 4000
"""Of each of a program's two streams, in the trajectories file."""
_MEBIBYTE = 1 << 20
_FURTHER_SECONDS = 60.0
"""Time for starting and stopping a sandbox, in addition to the time of a harness and its grading."""

HarnessEnd = Literal["unreachable", "no_answer", "hung", "limit", "crashed", "error"]
KINDS: dict[HarnessEnd, FailureKind] = {
    "unreachable": "infrastructure",
    "no_answer": "environment",
    "hung": "environment",
    "limit": "environment",
    "crashed": "environment",
    "error": "environment",
}
"""Names of failures, which begin their messages and count in `harness/num_*`, and the boundary that each crossed."""


CAUSED_BY_POLICY: tuple[HarnessEnd, ...] = ("crashed", "limit")
"""Ends that commands of the model can cause: graded where the model has answered."""


def get_output_end(failure: Failure) -> str:
    return failure.message.removeprefix("harness ").partition(":")[0]


def make_harness_failure(end: HarnessEnd, message: str) -> Failure:
    return Failure(KINDS[end], f"harness {end}: {message}")


@dataclass(frozen=True)
class Attempt:
    """Result of one attempt. A failed attempt has no reward."""

    record: "SessionRecord"
    reward: float = 0.0
    failure: Failure | None = None
    graded_end: Failure | None = None
    """How a harness ended that was graded nevertheless."""
    output: str | None = None
    """End of what a program printed, on standard output and standard error."""


@dataclass(frozen=True)
class Harness:
    """Agent program of `generator.harness`, with its functions loaded.

    Args:
        socket_path: socket of the endpoint, for a sandbox without network.
    """

    cfg: "HarnessConfig"
    function: Callable[[HarnessTask], Any] | None
    grader: Callable[[HarnessTask, Any], Any] | None
    socket_path: str

    def create_sandbox(self, folder: str | None = None) -> Sandbox:
        """Create a sandbox for one trajectory without starting it. Raises InfraError if no sandbox works on this
        machine.

        Args:
            folder: folder of the task's texts on this machine.
        """
        memory = int(self.cfg.memory_gb * 1024 * _MEBIBYTE)
        limits = Limits(
            wall_seconds=self.cfg.deadline_seconds,
            cpu_seconds=self.cfg.deadline_seconds,
            memory_bytes=memory,
            processes=256,
        )
        visible = {SOCKET: self.socket_path} | {path: path for path in self.cfg.visible}
        visible |= {} if folder is None else {TASK_FOLDER: folder}
        return make_sandbox(self.cfg.sandbox, limits=limits, visible=visible, image=self.cfg.image, pull=self.cfg.pull)

    def _create_grading_sandbox(self, limits: Limits) -> Sandbox:
        """Create a sandbox for grading, without the endpoint, the visible folders and the agent's files."""
        return make_sandbox(self.cfg.sandbox, limits=limits, image=self.cfg.image, pull=self.cfg.pull)

    def get_base_url(self, outside: str) -> str:
        """Return the endpoint's URL for a harness.

        Args:
            outside: URL for this process rather than for the sandbox.
        """
        if self.function is not None or self.cfg.sandbox == "process":
            return outside
        return f"http://127.0.0.1:{PORT}/s/{outside.partition('/s/')[2]}"

    def run_attempt(self, task: HarnessTask, close: "Callable[[], SessionRecord]") -> Attempt:
        """Run the harness in the task's sandbox and grade the resulting workspace.

        Args:
            close: ends the session and returns its recorded requests.
        """
        closed: list[SessionRecord] = []
        printed: str | None = None

        def record() -> "SessionRecord":
            closed.extend([] if closed else [close()])
            return closed[0]

        try:
            check_row(task.row, with_grade=self.grader is None)
            with task.sandbox:
                write_files(task.sandbox, task.row.get("files"))
                output, printed, failure = self._run(task)
                failure, graded_end = _check_outcome(record(), failure)
                if failure is not None:
                    return Attempt(record(), failure=failure, output=printed)
                reward = self._grade(task, output)
                return Attempt(record(), reward, graded_end=graded_end, output=printed)
        except RolloutError as error:
            return Attempt(record(), failure=Failure(error.kind, str(error)), output=printed)
        except InfraError as error:
            return Attempt(record(), failure=Failure("infrastructure", f"the sandbox failed: {error}"))
        except (ValueError, TypeError, KeyError) as error:  # files or grade of the row
            message = f"the row's `files` or `grade` cannot be used: {type(error).__name__}: {error}"
            return Attempt(record(), failure=Failure("environment", message))

    def _run(self, task: HarnessTask) -> tuple[Any, str | None, Failure | None]:
        """Run the harness. Return its result (for a program, its standard output), the end of its printed output, and
        its failure."""
        if self.function is None:
            return self._run_command(task)
        deadline = f"generator.harness.deadline_seconds={self.cfg.deadline_seconds:g}"
        try:
            return call_before_deadline(self.cfg.deadline_seconds, _call_function, self.function, task), None, None
        except DeadlineExceeded:
            return None, None, make_harness_failure("hung", f"{self.cfg.function} did not return within {deadline}")
        except InfraError:
            raise
        except Exception as error:  # the user's code may raise anything; it becomes the trajectory's failure
            return (
                None,
                None,
                make_harness_failure("error", f"{self.cfg.function} raised {type(error).__name__}: {error}"),
            )

    def _run_command(self, task: HarnessTask) -> tuple[str, str | None, Failure | None]:
        assert self.cfg.command is not None
        env = task.environment() | self.cfg.env
        try:
            words = task.command(self.cfg.command)
            if self.cfg.sandbox != "process":
                words = [task.sandbox.python, "-I", "-S", "-c", _FORWARDER, SOCKET, str(PORT), *words]
            process = task.sandbox.popen(words, env=env)
        except ValueError as error:  # what no system can start: a zero byte or a megabyte in an argument
            return "", None, make_harness_failure("crashed", f"the command cannot be started: {error}")
        process.stdin.close()
        output = _read_last(process.stdout, task.sandbox.limits.output_bytes)
        result = process.wait(_FURTHER_SECONDS)
        parts = (part.strip()[-_PRINTED_CHARACTERS:] for part in (output, result.stderr))
        return output, "\n".join(filter(None, parts)), self._find_failure(result, output)

    def _find_failure(self, result: ExecResult, output: str) -> Failure | None:
        if result.ok:
            return None
        said = (result.stderr.strip() or output.strip())[-_LAST_WORDS:]
        if result.outcome == "wall_time":
            deadline = f"generator.harness.deadline_seconds={self.cfg.deadline_seconds:g}"
            return make_harness_failure("hung", f"it was terminated after {deadline}; end of its output: {said}")
        if result.outcome != "exited":
            return make_harness_failure("limit", f"it was terminated by the sandbox limit of {result.outcome}: {said}")
        if result.returncode == UNREACHABLE and self.cfg.sandbox != "process":
            return make_harness_failure("unreachable", said)
        if result.returncode == NOT_STARTED:
            said += f"\nIs {(self.cfg.command or [''])[0]!r} in the sandbox (generator.harness.visible, .image)?"
        return make_harness_failure("crashed", f"exit status {result.returncode}: {said}")

    def _grade(self, task: HarnessTask, output: Any) -> float:
        """Compute the reward. Raises RolloutError of kind `reward`, or InfraError."""
        if self.grader is None and task.row.get("grade"):
            return grade_workspace(task, self.cfg.grade_seconds, self._create_grading_sandbox)
        if self.grader is None:
            return convert_reward(output, f"generator.harness.function={self.cfg.function} (there is no grader)")
        source = f"generator.harness.grader={self.cfg.grader}"
        try:
            value = call_before_deadline(self.cfg.grade_seconds, _call_function, self.grader, task, output)
        except DeadlineExceeded:
            late = f"did not return within generator.harness.grade_seconds={self.cfg.grade_seconds:g}"
            raise RolloutError("reward", f"{source} {late}") from None
        except InfraError:
            raise
        except Exception as error:  # the user's code may raise anything; it becomes the trajectory's failure
            raise RolloutError("reward", f"{source} raised {type(error).__name__}: {error}") from error
        return convert_reward(value, source)


def _check_outcome(record: "SessionRecord", failure: Failure | None) -> tuple[Failure | None, Failure | None]:
    """Return the failure of a trajectory, given its requests, and its end if it is graded nevertheless.

    If the budget was used up, this is the reason of the end, regardless of how the harness handled the refusal. A
    program that fails with an exit status, or at a limit of memory or files, after the model responded is graded: the
    model's commands can cause both, and a policy must not be able to exclude a bad grade from the baseline.
    """
    if failure is not None and failure.kind == "infrastructure":
        return failure, None
    if not record.turns:
        message = f"{record.num_admitted} requests, none of which completed"
        if not record.num_admitted:
            message = "it made no request that the endpoint accepted. Does it read OPENAI_BASE_URL and OPENAI_API_KEY?"
        return make_harness_failure("no_answer", message + ("" if failure is None else f" ({failure.message})")), None
    if record.used_up:
        return None, None
    if failure is not None and get_output_end(failure) in CAUSED_BY_POLICY:
        return None, failure
    return failure, None


def _call_function(function: Callable[..., Any], *args: object) -> Any:
    """Call a function; an asynchronous function runs in a separate event loop."""
    result = function(*args)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited())


def _read_last(stream: IO[bytes], num_bytes: int) -> str:
    """Read to the end and return the last part."""
    parts: deque[bytes] = deque()
    size = 0
    with contextlib.suppress(OSError, ValueError):  # closed under us: the sandbox was ended
        while part := stream.read(1 << 16):
            parts.append(part)
            size += len(part)
            while size - len(parts[0]) >= num_bytes:
                size -= len(parts.popleft())
    return b"".join(parts)[-num_bytes:].decode(errors="replace")


def load_function(setting: str, name: str | None) -> Callable[..., Any] | None:
    """Import `package.module:function`. Raises ConfigError."""
    if name is None:
        return None
    function = import_object(setting, name)
    if not callable(function):
        raise ConfigError(f"{setting}={name!r} is not a function: {function!r}")
    return function
