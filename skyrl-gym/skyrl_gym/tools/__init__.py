"""Tools that environments offer to a model. The dependencies of a group are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

from skyrl_gym.tools.calculator import CalculatorToolGroup
from skyrl_gym.tools.core import ToolGroup, tool

if TYPE_CHECKING:
    from skyrl_gym.chat.tool_calls import ToolCall, parse_tool_calls
    from skyrl_gym.tools.mcp import MCPToolGroup
    from skyrl_gym.tools.python import PythonCodeExecutorToolGroup
    from skyrl_gym.tools.search import SearchToolGroup
    from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

__all__ = [
    "CalculatorToolGroup",
    "MCPToolGroup",
    "PythonCodeExecutorToolGroup",
    "SQLCodeExecutorToolGroup",
    "SearchToolGroup",
    "ToolCall",
    "ToolGroup",
    "parse_tool_calls",
    "tool",
]

_MODULES = {
    "MCPToolGroup": "skyrl_gym.tools.mcp",
    "PythonCodeExecutorToolGroup": "skyrl_gym.tools.python",
    "SQLCodeExecutorToolGroup": "skyrl_gym.tools.sql",
    "SearchToolGroup": "skyrl_gym.tools.search",
    "ToolCall": "skyrl_gym.chat.tool_calls",
    "parse_tool_calls": "skyrl_gym.chat.tool_calls",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
