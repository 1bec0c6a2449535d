"""Tool with which an agent ends."""

from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput


class Finish(BaseTool):
    """Tool that ends the agent with a final response."""

    name = "finish"

    async def run(self, context: ToolContext, answer: str) -> ToolOutput:
        """Ends the task with an answer. Call it once, when nothing is left to do.

        Args:
            answer: The complete final answer, in the form that the task asks for.
        """
        return ToolOutput(answer, ends=True)


class BoxedFinish(BaseTool):
    """Tool that ends the agent with a boxed final answer."""

    name = "finish"

    async def run(self, context: ToolContext, answer: str) -> ToolOutput:
        """Ends the task with an answer. Call it once, when nothing is left to do.

        Args:
            answer: The final answer and nothing else: a name, a number, a few words.
        """
        return ToolOutput(answer if "\\boxed{" in answer else f"\\boxed{{{answer}}}", ends=True)
