"""Tools that are not a `BaseTool`: methods of skyrl_gym's tool groups, tools of MCP servers, and tools as the published
skyrl-agent has them.
"""

import inspect
import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes.threads import run_in_thread
from skyrl_agent.tools.base import BaseTool, ToolContext, ToolOutput
from skyrl_agent.types import JsonObject
from skyrl_gym.tools.core import ToolGroup, as_text, function_schema

FAILED = ("Error in ", "Error calling ", "Error: ")
"""Beginnings of the texts in which a tool group says what went wrong."""


class GroupTool(BaseTool):
    """One tool of a group, which is shared by all trajectories and calls of this process."""

    def __init__(self, group: ToolGroup, schema: JsonObject) -> None:
        self._group, self._schema = group, schema
        self.name = schema["function"]["name"]  # pyright: ignore[reportAttributeAccessIssue]

    def schema(self) -> JsonObject:
        return self._schema

    async def call(self, context: ToolContext, arguments: JsonObject) -> ToolOutput:
        text = await run_in_thread(math.inf, self._group.call, self.name, arguments)
        return ToolOutput(text, failed=text.startswith(FAILED))


_groups: dict[str, ToolGroup] = {}
_lock = threading.Lock()


def get_group_tools(name: str, kind: type[ToolGroup], settings: JsonObject) -> list[BaseTool]:
    """Return the tools of a group, which is made once in a process for the same settings.

    Args:
        settings: keywords of the group, and `only`: names of the tools to take; none: all.

    Raises:
        ConfigError: a setting is wrong, or the group does not work (an MCP server does not start).
    """
    only = settings.pop("only", None)
    key = f"{kind.__module__}.{kind.__qualname__} {json.dumps(settings, sort_keys=True, default=repr)}"
    with _lock:
        if key not in _groups:
            _groups[key] = _create_group(name, kind, settings)
        group = _groups[key]
    tools = [GroupTool(group, schema) for schema in group.schemas()]
    names = [tool.name for tool in tools]
    if unknown := [wanted for wanted in only or () if wanted not in names]:
        raise ConfigError(f"tools: {name}: only: unknown tool {unknown[0]!r}; known: {', '.join(names)}")
    return [tool for tool in tools if only is None or tool.name in only]


def _create_group(name: str, kind: type[ToolGroup], settings: JsonObject) -> ToolGroup:
    try:
        return kind(**settings)
    except ModuleNotFoundError as error:
        raise ConfigError(f"tools: {name} needs the package {error.name}, which is not installed") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tools: settings of {name}: {error}") from error
    except InfraError as error:
        raise ConfigError(f"tools: {name}: {error}") from error


def close_groups() -> None:
    """Close all groups of this process; MCP servers that were started end."""
    with _lock:
        for group in _groups.values():
            group.close()
        _groups.clear()


def is_published(kind: type[Any]) -> bool:
    """Return whether a class defines `call(self, params, **kwargs)`, as published tools do."""
    call = getattr(kind, "call", None)
    return call is not BaseTool.call and call is not None and "context" not in inspect.signature(call).parameters


class PublishedTool(BaseTool):
    """A tool with `name`, `description`, `parameters` (a JSON schema, or a list of parameters) and
    `call(self, params, **kwargs)`, which gets the arguments as JSON text and runs in a thread. kwargs: `trajectory_id`,
    `agent`: the call's `ToolContext`. An output of None is an empty result for the model."""

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self.name = tool.name  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters = _build_json_schema(self.name, tool.parameters)

    def schema(self) -> JsonObject:
        return function_schema(self.name, str(self._tool.description), self._parameters)

    def get_system_prompt_prefix(self) -> str:
        own = getattr(self._tool, "get_system_prompt_prefix", None)
        return (own() if own else None) or ""

    async def call(self, context: ToolContext, arguments: JsonObject) -> ToolOutput:
        if missing := [key for key in self._parameters["required"] if key not in arguments]:
            return ToolOutput(f"Error calling {self.name}: argument {missing[0]!r} is missing", failed=True)

        def work() -> Any:
            params = json.dumps(arguments, ensure_ascii=False)
            return self._tool.call(params, agent=context, trajectory_id=context.trajectory_id)

        try:
            output = await run_in_thread(math.inf, work)
            if inspect.isawaitable(output):
                output = await output
        except InfraError:
            raise
        except Exception as error:  # a tool may raise anything; the trajectory continues
            return ToolOutput(f"Error in {self.name}: {str(error) or type(error).__name__}", failed=True)
        if isinstance(output, ToolOutput):
            return output
        return ToolOutput(as_text(output), ends=self.name == "finish")


def _build_json_schema(name: str, parameters: Any) -> JsonObject:
    """Return the schema of parameters; a list of them has `name`, `type`, `description`, `required` of each.

    Raises:
        ConfigError: they are neither.
    """
    if isinstance(parameters, Mapping) and parameters.get("type") == "object":
        return {"properties": {}, "required": [], **parameters}
    if isinstance(parameters, list) and all(isinstance(each, Mapping) and "name" in each for each in parameters):
        properties = {
            each["name"]: {key: value for key, value in each.items() if key not in ("name", "required")}
            for each in parameters
        }
        required = [each["name"] for each in parameters if each.get("required")]
        return {"type": "object", "properties": properties, "required": required}
    raise ConfigError(
        f"tools: {name}: parameters must be a JSON schema of type object, or a list of parameters with names; got "
        f"{parameters!r}"
    )
