"""Handing a part of a task to a sub-agent."""

from collections.abc import Sequence

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolEntry
from skyrl_agent.tools.factory import make_tools


class Delegate(BaseTool):
    """
    Args:
        tools: tools of the sub-agent; None: the calling agent's tools.
        max_iterations: step limit of the sub-agent; None: the agent's limit.
        timeout_seconds: timeout of the sub-agent's whole run.
    """

    name = "delegate"

    def __init__(
        self,
        *,
        tools: Sequence[ToolEntry] | None = None,
        max_iterations: int | None = None,
        timeout_seconds: float = 3600.0,
    ) -> None:
        if max_iterations is not None and max_iterations < 1:
            raise ConfigError(f"tool {self.name}: max_iterations must be at least 1; got {max_iterations}")
        make_tools(tools or ())  # raises invalid tools before the run
        self.tools, self.max_iterations, self.timeout_seconds = tools, max_iterations, timeout_seconds

    async def run(self, context: ToolContext, task: str) -> str:
        """Hands a part of the work to a helper, who works on it alone and reports back.

        Args:
            task: All that the helper needs to know, since it sees nothing of this. Say what its answer must hold.
        """
        if context.run_agent is None:
            raise ValueError("there are no sub-agents here: do the work yourself")
        return await context.run_agent(task, tools=self.tools, max_iterations=self.max_iterations)
