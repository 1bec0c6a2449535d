"""A user's module: tools of several kinds and an agent, as a task file names them; and an MCP server, if it is run."""

import threading
from typing import Any, ClassVar

from skyrl_agent.agents.react import ReActAgent
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.tools.base import BaseTool, ToolContext, register_tool
from skyrl_agent.types import Message
from skyrl_gym.tools import ToolGroup, tool


class CountWords(BaseTool):
    name = "count_words"

    def run(self, context: ToolContext, text: str, minimum: int = 1) -> int:
        """Counts words.

        Args:
            text: what to count in
        """
        assert threading.current_thread() is not threading.main_thread()
        return sum(len(word) >= minimum for word in text.split())


@register_tool("own_reverse_published")
class Reverse(BaseTool):
    """Tool in the form of the published package."""

    name = "reverse"
    description = "Reverses a text."  # type: ignore[assignment]
    parameters: ClassVar[Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def call(self, params: str, **kwargs: Any) -> dict[str, str]:  # type: ignore[override]
        arguments = self._verify_json_format_args(params)
        assert kwargs["trajectory_id"]
        if arguments["text"] == "bad":
            raise RuntimeError("a bad text")
        return {"results": arguments["text"][::-1]}


class Scales(ToolGroup):
    def __init__(self, unit: str = "g"):
        super().__init__("scales")
        self.unit = unit

    @tool
    def weigh(self, thing: str) -> str:
        """Weighs a thing."""
        return f"{len(thing)} {self.unit}"

    @tool
    def tare(self) -> str:
        """Sets it to zero."""
        return "0"


class Anything(BaseTask):
    def get_instruction(self, instance: Instance) -> list[Message]:
        return list(instance.row["prompt"])

    async def evaluate_result(self, result: Any, instance: Instance, trajectory: Any, runtime: Any = None) -> float:
        return 1.0


class PoliteAgent(ReActAgent):
    """An agent of a user."""


def serve() -> None:
    from mcp.server import MCPServer

    server = MCPServer("numbers")

    @server.tool()
    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    server.run("stdio")


if __name__ == "__main__":
    serve()
