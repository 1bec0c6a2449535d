"""Tools of a task file, by name or dotted path."""

import inspect
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from skyrl_agent.dotted_paths import resolve_class
from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import TOOL_REGISTRY, BaseTool, ToolEntry
from skyrl_agent.tools.foreign import PublishedTool, get_group_tools, is_published
from skyrl_agent.types import JsonObject
from skyrl_gym.suggestions import did_you_mean
from skyrl_gym.tools.core import ToolGroup

MCP = "skyrl_gym.tools.mcp:MCPToolGroup"


def make_tool(name: str, settings: JsonObject | None = None) -> BaseTool:
    """Build the single tool of a name; see `make_tools_of`."""
    [tool] = make_tools_of(name, settings)
    return tool


def make_tools_of(name: str, settings: JsonObject | None = None) -> list[BaseTool]:
    """Build the tools for a name in a task file: a tool, or the tools of a tool group or an MCP server.

    Raises:
        ConfigError: the tool is unknown, has an invalid setting, or needs a package that is not installed.
    """
    settings = settings or {}
    found = _find_class(name)
    if issubclass(found, ToolGroup):
        return get_group_tools(name, found, settings)
    _check_settings(name, found, settings)
    if not is_published(found):
        return [found(**settings)]
    return [PublishedTool(found(**settings))]


def _find_class(name: str) -> type[Any]:
    found = MCP if name == "mcp" else TOOL_REGISTRY.get(name)
    if found is None and "." not in name:
        near = did_you_mean(name, sorted([*TOOL_REGISTRY, "mcp"]))
        raise ConfigError(
            f"tools: unknown tool {name!r}; {near} (for a custom tool: its dotted path, or the module that "
            "registers it under `imports`)"
        )
    found = resolve_class(name, "tools") if found is None else found
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    if not (isinstance(found, type) and (issubclass(found, BaseTool | ToolGroup) or hasattr(found, "call"))):
        raise ConfigError(f"tools: {name!r} must be a subclass of BaseTool or ToolGroup, or have `call`; got {found!r}")
    return found


def _check_settings(name: str, found: type[Any], settings: JsonObject) -> None:
    has_none = found.__init__ is BaseTool.__init__
    known = inspect.Signature() if has_none else inspect.signature(found)
    try:
        known.bind(**settings)
    except TypeError as error:
        has = f"it has {', '.join(known.parameters)}" if known.parameters else "it has none"
        raise ConfigError(f"tools: settings of {name}: {error}; {has}") from None


def make_tools(entries: Sequence[ToolEntry]) -> list[BaseTool]:
    """
    Raises:
        ConfigError: as `make_tool`, or two tools have one name for the model.
    """
    named = [item for entry in entries for item in ({entry: {}} if isinstance(entry, str) else entry).items()]
    named_tools = [(name, tool) for name, settings in named for tool in make_tools_of(name, dict(settings or {}))]
    tools = [tool for _, tool in named_tools]
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            twins = [registered for registered, tool in named_tools if tool.name == name]
            raise ConfigError(
                f"tools: {' and '.join(twins)} have the same name {name!r} for the model; keep one of them"
            )
    return tools
