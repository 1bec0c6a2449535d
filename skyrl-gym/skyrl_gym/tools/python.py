"""The Python tool: runs what a model wrote in a sandbox."""

from dataclasses import replace

from skyrl_gym.sandbox import ExecResult, Limits, Sandbox, make_sandbox
from skyrl_gym.tools.core import ToolGroup, tool

ERROR_PREFIX = "Error executing Python code: "
MAX_CODE_BYTES = 100_000
"""A little under what Linux takes as one argument of a command."""

_LIMITS = {
    "memory": "the code used too much memory",
    "cpu_time": "the code used too much processor time",
    "output": "the code printed too much",
    "workspace": "the code wrote too much to files",
}


class PythonCodeExecutorToolGroup(ToolGroup):
    """Tool group with one tool, `python`. Files in the working folder persist between calls."""

    def __init__(self, timeout: float = 10.0, sandbox: Sandbox | None = None):
        """
        Args:
            timeout: seconds for one call.
            sandbox: where to run, started; it stays the caller's. Without one, the first call makes one that `close`
                gives back.
        """
        self.timeout = timeout
        self._sandbox = sandbox
        self._owned: Sandbox | None = None
        super().__init__(name="PythonCodeExecutorToolGroup")

    @tool
    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Print what you want to see.

        Args:
            code: The program.

        Raises:
            InfraError: the sandbox failed.
        """
        program = code.encode("utf-8", errors="replace").decode("utf-8")  # half a surrogate pair has no UTF-8 form
        if "\0" in program:
            return f"{ERROR_PREFIX}source code cannot contain null bytes"
        if len(program.encode()) > MAX_CODE_BYTES:
            return f"{ERROR_PREFIX}the code is longer than {MAX_CODE_BYTES} bytes"
        sandbox = self._started_sandbox()
        limits = replace(sandbox.limits, wall_seconds=self.timeout, cpu_seconds=self.timeout)
        return self._text_of(sandbox.exec([sandbox.python, "-c", program], limits=limits))

    def _text_of(self, result: ExecResult) -> str:
        if result.outcome == "wall_time":
            return f"{ERROR_PREFIX}the code ran longer than {self.timeout:g} seconds"
        if result.outcome != "exited":
            return ERROR_PREFIX + _LIMITS[result.outcome]
        if result.stderr.strip():
            return ERROR_PREFIX + result.stderr.strip()
        if result.returncode < 0:
            return f"{ERROR_PREFIX}the process ended by signal {-result.returncode}"
        return result.stdout.strip()

    def _started_sandbox(self) -> Sandbox:
        if self._sandbox is not None:
            return self._sandbox
        if self._owned is None:
            sandbox = make_sandbox(limits=Limits())
            sandbox.start()
            self._owned = sandbox
        return self._owned

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()
            self._owned = None
