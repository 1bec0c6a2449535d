"""Python tools: run the model's code in the trajectory's runtime, else in a separate runtime."""

from importlib.resources import files

from pydantic import ValidationError

from skyrl_agent.config.task_file import RuntimeSection
from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import make_runtime, merge_spec
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeSpec
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput
from skyrl_agent.types import JsonObject
from skyrl_gym.graders.code import extract_code

NOTHING_PRINTED = "The program ran without error and printed nothing. Print what you want to see."

_LIMITS = {
    "wall_time": "it ran longer than {seconds:g} seconds",
    "cpu_time": "it used more than {seconds:g} seconds of processor time",
    "memory": "it used too much memory",
    "output": "it printed too much",
    "workspace": "it wrote too much to files",
}


class CodeInterpreter(BaseTool):
    """
    Args:
        timeout: seconds for one program.
        memory_bytes: of one program.
        runtime: of a trajectory that has none: keys as in the task file's `runtime`.
    """

    name = "code_interpreter"

    def __init__(
        self, *, timeout: float = 30.0, memory_bytes: int = 1 << 30, runtime: JsonObject | None = None
    ) -> None:
        self.limits = Limits(wall_seconds=timeout, cpu_seconds=timeout, memory_bytes=memory_bytes)
        try:
            self.spec = merge_spec(RuntimeSection(**(runtime or {})), RuntimeSpec(limits=self.limits))
        except ValidationError as failure:
            raise ConfigError(f"tool {self.name}: runtime: {failure}") from None
        self._own: Runtime | None = None

    async def run(self, context: ToolContext, code: str, language: str = "python") -> str | ToolOutput:
        """Runs a Python program and returns what it prints; if its last line is an expression, its value too. Each
        call starts anew: variables are gone, files in the working directory stay.

        Args:
            code: The program.
            language: Only python.
        """
        if language.lower() not in ("python", "python3", "py"):
            raise ValueError(f"language must be python; got {language!r}")
        return await self._run_program(context, code)

    async def _run_program(self, context: ToolContext, code: str) -> str | ToolOutput:
        runtime = context.runtime or await self._open_runtime()
        program = extract_code(code) if code.lstrip().startswith("```") else None
        source = (code if program is None else program).encode(errors="replace")
        inside = (files("skyrl_agent.tools") / "inside_python.py").read_text()
        result = await runtime.exec([runtime.python, "-c", inside], stdin=source, limits=self.limits)
        return self._format_result(result)

    def _format_result(self, result: ExecResult) -> str | ToolOutput:
        parts = [result.stdout.strip(), result.stderr.strip()]
        if result.outcome != "exited":
            parts.append(
                "Error: the program was ended: " + _LIMITS[result.outcome].format(seconds=self.limits.wall_seconds)
            )
        elif result.returncode < 0:
            parts.append(f"Error: the program was ended by signal {-result.returncode}")
        elif result.returncode > 0 and not parts[1]:
            parts.append(f"Error: the program ended with exit status {result.returncode}")
        return ToolOutput("\n".join(filter(None, parts)) or NOTHING_PRINTED, failed=not result.ok)

    async def _open_runtime(self) -> Runtime:
        if self._own is None:
            runtime = make_runtime(self.spec)
            self._own = runtime  # before the start, so that a cancelled start is closed too
            await runtime.start()
            return runtime
        return self._own

    async def close(self) -> None:
        if self._own is not None:
            runtime, self._own = self._own, None
            await runtime.close()


class Python(CodeInterpreter):
    """The same under a shorter name, with one argument."""

    name = "python"

    async def run(self, context: ToolContext, code: str) -> str | ToolOutput:
        """Runs a Python program and returns what it prints; if its last line is an expression, its value too. Each
        call starts anew: variables are gone, files in the working directory stay.

        Args:
            code: The program.
        """
        return await self._run_program(context, code)
