"""A place for thoughts between calls."""

from skyrl_agent.tools.base import BaseTool, ToolContext


class Think(BaseTool):
    """Tool that does nothing."""

    name = "think"

    async def run(self, context: ToolContext, thought: str) -> str:
        """Writes a thought down. It changes nothing and finds nothing out: use it to plan or to compare ways.

        Args:
            thought: What you think.
        """
        return "Noted."
