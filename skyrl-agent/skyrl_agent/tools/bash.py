"""A shell: one command at a time, with a memory of where it was."""

import re
import signal
import uuid
from importlib.resources import files

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes.base import ExecResult, Limits
from skyrl_agent.tools.base import ToolContext, ToolOutput
from skyrl_agent.tools.in_runtime import ABOVE_COMMAND_SECONDS, RuntimeTool, within

NO_QUESTIONS = {"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "PIP_NO_INPUT": "1"}
"""Environment variables that keep programs from waiting for keyboard input. A command may set them otherwise."""
SHELL = 'eval "$2"; eval "$__agent_command"; { __agent_end "$?"; } 2>/dev/null'
MEBIBYTE = 1 << 20
BINARY_SHARE = 0.1
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Bash(RuntimeTool):
    """
    Args:
        timeout: default timeout of a command in seconds.
        max_timeout: maximum timeout that a command may request.
    """

    name = "bash"

    def __init__(self, *, timeout: float = 120.0, max_timeout: float = 600.0) -> None:
        if not 0 < timeout <= max_timeout:
            raise ConfigError(
                f"tools: bash: timeout must be above 0 and at most max_timeout {max_timeout:g}; got {timeout:g}"
            )
        self.timeout, self.max_timeout = timeout, max_timeout
        self.timeout_seconds = max_timeout + ABOVE_COMMAND_SECONDS
        self._shell = uuid.uuid4().hex

    async def run(self, context: ToolContext, command: str, timeout: float | None = None) -> ToolOutput:
        """Runs a command in bash and returns what it prints, with its exit code. The working directory and exported
        variables stay for the next call; functions, aliases and shell options do not. Nothing can be typed in: standard
        input is empty. Processes left in the background end with the call.

        Args:
            command: One command line, or a script of several lines.
            timeout: Seconds after which it is ended, if the default is too short or too long.
        """
        if "\0" in command:
            raise ValueError("the command has a zero character in it, which no shell can read")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0; got {timeout:g}")
        runtime = self.runtime_of(context)
        limits = within(runtime, min(timeout or self.timeout, self.max_timeout))
        prepare = (files("skyrl_agent.tools") / "inside_bash.sh").read_text()
        arguments = ["bash", "-c", SHELL, "bash", self._shell, prepare]
        result = await runtime.exec(arguments, stdin=command, env=NO_QUESTIONS, limits=limits)
        text = render_terminal(result.stdout + result.stderr).rstrip()
        note = self._describe_exit(result, limits)
        return ToolOutput(f"{text}\n{note}" if text else note, failed=result.outcome != "exited")

    def _describe_exit(self, result: ExecResult, limits: Limits) -> str:
        if result.outcome == "exited":
            code = result.returncode
            return f"[exit code {code}]" if code >= 0 else f"[ended by signal {-code} ({_get_signal_name(-code)})]"
        why = {
            "wall_time": f"it took longer than {limits.wall_seconds:g} seconds (timeout: at most {self.max_timeout:g})",
            "cpu_time": f"it took more than {limits.cpu_seconds:g} seconds of processor time",
            "memory": f"it took more than {limits.memory_bytes // MEBIBYTE} MiB of memory",
            "output": f"it printed more than {limits.output_bytes // MEBIBYTE} MiB; send it to a file, look at parts",
            "workspace": f"its files took more than {limits.workspace_bytes // MEBIBYTE} MiB",
        }[result.outcome]
        return f"[ended: {why}. Working directory and variables are as before the command.]"


def render_terminal(output: str) -> str:
    """Return the final screen of a terminal: no colours, the last state of a progress bar. Binary output is named, not
    shown."""
    strange = output.count("\ufffd") + output.count("\0")
    if strange > BINARY_SHARE * len(output):
        return f"[{len(output)} characters of binary output, not shown]"
    text = _ESCAPE.sub("", output)
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("\ufffd", "\n".join(lines))


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
