"""Base class of tools that work in the trajectory's runtime."""

from dataclasses import replace

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes.base import Limits, Runtime
from skyrl_agent.tools.base import BaseTool, ToolContext

ABOVE_COMMAND_SECONDS = 30.0
"""Time that a call may take in addition to its command before the agent gives it up."""


class RuntimeTool(BaseTool):
    """Tool that works in the trajectory's runtime."""

    async def open(self, context: ToolContext) -> None:
        """Raises ConfigError without a runtime."""
        self.runtime_of(context)

    def runtime_of(self, context: ToolContext) -> Runtime:
        """Return the runtime. Raises ConfigError without one."""
        if context.runtime is None:
            raise self.without_runtime()
        return context.runtime

    def without_runtime(self) -> ConfigError:
        """Return the error of a task without a runtime."""
        return ConfigError(
            f"tools: {self.name} needs a runtime, but the task has none; use a task with a runtime, or remove "
            f"{self.name}"
        )


def within(runtime: Runtime, seconds: float) -> Limits:
    """Return the runtime's limits with this wall-clock time, and at least as much CPU time."""
    limits = runtime.spec.limits
    return replace(limits, wall_seconds=seconds, cpu_seconds=max(seconds, limits.cpu_seconds))
