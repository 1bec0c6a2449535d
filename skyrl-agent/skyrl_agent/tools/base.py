"""Base class of tools, and the registry of their names. Importing this imports no tool."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.types import JsonObject, Message, Probeable, Row
from skyrl_gym.suggestions import did_you_mean
from skyrl_gym.tools.core import as_text, function_schema
from skyrl_gym.tools.signature import ArgumentError, Signature, parse_docstring

__all__ = [
    "TOOL_REGISTRY",
    "ArgumentError",
    "BaseTool",
    "ToolContext",
    "ToolEntry",
    "ToolOutput",
    "make_tool",
    "make_tools",
    "register_tool",
]


@dataclass
class ToolContext:
    """Context of a call."""

    trajectory_id: str
    """Unique in the run; servers may route by it."""
    row: Row
    """The instance's."""
    runtime: Runtime | None = None
    ask: Callable[[list[Message]], Awaitable[str]] | None = None
    """Function that asks the agent's own model a question outside the conversation. Not trained on."""
    run_agent: Callable[..., Awaitable[str]] | None = None
    """Function that runs a sub-agent, whose turns belong to the trajectory: (instruction, tools=None,
    max_iterations=None) -> answer."""
    messages: list[Message] = field(default_factory=list)
    """A copy of the conversation so far."""
    memory: JsonObject = field(default_factory=dict)
    """The tools' own, for one trajectory."""


@dataclass(frozen=True)
class ToolOutput:
    """Result of a call. A plain string is the text alone."""

    text: str
    """Output shown to the model, truncated by the agent."""
    ends: bool = False
    """The agent is done and `text` is its answer (a `finish` tool)."""
    new_context: list[Message] | None = None
    """The conversation starts over from these messages; `text` is not shown."""
    failed: bool = False
    """True if the call failed, for the records; `text` says what went wrong."""


class BaseTool:
    """One function that a model may call. Subclasses define `async def run(self, context, ...)`; name, description and
    schema come from the class attribute, the docstring of `run` and its type hints.

    A new instance per trajectory, closed at its end; heavy things (an index, a client) are shared through the class.
    """

    name: ClassVar[str]
    """Name by which the model calls the tool."""
    timeout_seconds: float | None = None
    """Timeout of one call, in place of `generator.tool_timeout_seconds`."""

    async def run(self, context: ToolContext, *args: Any, **kwargs: Any) -> str | ToolOutput:
        """Raises InfraError if what it stands on did not work; any other exception's text is for the model."""
        raise NotImplementedError

    async def open(self, context: ToolContext) -> None:
        """Called once, before the first turn. Raises InfraError."""

    async def probe(self) -> None:
        """Check before a run that the tool's clients, which are attributes, reach their servers. Raises InfraError."""
        for client in vars(self).values():
            if isinstance(client, Probeable):
                try:
                    await client.probe()
                except InfraError as error:
                    raise InfraError(f"tools: {self.name}: {error}") from error

    async def close(self) -> None:
        """Release resources. May be called more than once; never raises."""

    def get_system_prompt_prefix(self) -> str:
        """Text that the agent puts before its system message."""
        return ""

    @property
    def signature(self) -> Signature:
        return Signature(type(self).run, skip=2)  # self, context

    @property
    def description(self) -> str:
        return parse_docstring(type(self).run.__doc__).description

    def schema(self) -> JsonObject:
        """Return the schema in OpenAI's form."""
        return function_schema(self.name, self.description, self.signature.schema())

    async def call(self, context: ToolContext, arguments: JsonObject) -> ToolOutput:
        """A call as a model wrote it. What goes wrong because of the model, or inside the tool, becomes text for it.

        Raises:
            InfraError: of `run`.
        """
        try:
            output = await self.run(context, **self.signature.bind(arguments))
        except ArgumentError as error:
            return ToolOutput(f"Error calling {self.name}: {error}", failed=True)
        except InfraError:
            raise
        except Exception as error:  # a tool may do anything, and the trajectory goes on
            return ToolOutput(f"Error in {self.name}: {str(error) or type(error).__name__}", failed=True)
        return output if isinstance(output, ToolOutput) else ToolOutput(as_text(output))


ToolEntry = str | Mapping[str, Mapping[str, Any]]
"""A tool in a task file: a registry name, or `{name: {keywords of the tool}}`."""

TOOL_REGISTRY: dict[str, str | type[BaseTool]] = {}
"""Name -> class, or `module:Class` of one that is imported when it is first asked for."""


def register_tool(name: str, allow_overwrite: bool = False) -> Callable[[type[BaseTool]], type[BaseTool]]:
    """Class decorator: makes a tool known under `name` in task files.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[BaseTool]) -> type[BaseTool]:
        if name in TOOL_REGISTRY and not allow_overwrite:
            raise ValueError(
                f"a tool is registered as {name!r} already: pass allow_overwrite=True, or choose another name"
            )
        TOOL_REGISTRY[name] = cls
        return cls

    return register


def make_tool(name: str, settings: JsonObject | None = None) -> BaseTool:
    """
    Raises:
        ConfigError: there is no such tool; a setting of it is wrong; what it needs is not installed.
    """
    if name not in TOOL_REGISTRY:
        raise ConfigError(f"tools: there is no tool {name!r}; {did_you_mean(name, sorted(TOOL_REGISTRY))}")
    found = TOOL_REGISTRY[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(import_module(module), attribute)
    settings = settings or {}
    known = inspect.signature(found)
    try:
        known.bind(**settings)
    except TypeError as error:
        has = f"it has {', '.join(known.parameters)}" if known.parameters else "it has none"
        raise ConfigError(f"tools: settings of {name}: {error}; {has}") from None
    return found(**settings)  # pyright: ignore[reportCallIssue]


def make_tools(entries: Sequence[ToolEntry]) -> list[BaseTool]:
    """
    Raises:
        ConfigError: as `make_tool`, or two tools have one name for the model.
    """
    named = [item for entry in entries for item in ({entry: {}} if isinstance(entry, str) else entry).items()]
    tools = [make_tool(name, dict(settings or {})) for name, settings in named]
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            twins = [registered for (registered, _), tool in zip(named, tools, strict=True) if tool.name == name]
            raise ConfigError(f"tools: {' and '.join(twins)} are both called {name!r} by the model; keep one of them")
    return tools
