"""Base class of tools, and the registry of their names. Importing this imports no tool."""

import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.runtimes.threads import run_in_thread
from skyrl_agent.types import JsonObject, Message, Probeable, Row
from skyrl_gym.tools.core import as_text, function_schema
from skyrl_gym.tools.signature import ArgumentError, Signature, parse_docstring

__all__ = [
    "TOOL_REGISTRY",
    "ArgumentError",
    "BaseTool",
    "ToolContext",
    "ToolEntry",
    "ToolOutput",
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

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = cfg

    def run(self, context: ToolContext, *args: Any, **kwargs: Any) -> Any:
        """Run one call. `async def`, or `def`, which runs in a thread: it should limit its own time.

        Returns: text or a `ToolOutput`; anything else becomes JSON.

        Raises:
            InfraError: an infrastructure failure. The text of any other exception is returned to the model.
        """
        raise NotImplementedError

    async def open(self, context: ToolContext) -> None:
        """Open resources. Called once, before the first turn. Raises InfraError."""

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
        """Return the text that the agent puts before its system message."""
        return ""

    def _verify_json_format_args(self, params: str | Mapping[str, Any], strict_json: bool = False) -> JsonObject:
        """Read the arguments of a published tool's `call`. Raises ValueError: not an object, or a required one is
        missing."""
        arguments = params if isinstance(params, Mapping) else json.loads(params)
        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments must be an object; got {params!r}")
        schema: Any = getattr(self, "parameters", {})
        required = schema.get("required", []) if isinstance(schema, Mapping) else []
        if missing := [key for key in required if key not in arguments]:
            raise ValueError(f"argument {missing[0]!r} is missing")
        return dict(arguments)

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
        """Run a call of the model. Errors of the model or inside the tool are returned to it as text.

        Raises:
            InfraError: of `run`.
        """
        try:
            bound = self.signature.bind(arguments)
            if inspect.iscoroutinefunction(self.run):
                output = await self.run(context, **bound)
            else:
                output = await run_in_thread(math.inf, functools.partial(self.run, context, **bound))
                if inspect.isawaitable(output):  # `run` is wrapped by a plain function
                    output = await output
        except ArgumentError as error:
            return ToolOutput(f"Error calling {self.name}: {error}", failed=True)
        except InfraError:
            raise
        except Exception as error:  # a tool may raise anything; the trajectory continues
            return ToolOutput(f"Error in {self.name}: {str(error) or type(error).__name__}", failed=True)
        return output if isinstance(output, ToolOutput) else ToolOutput(as_text(output))


ToolEntry = str | Mapping[str, Mapping[str, Any]]
"""Tools in a task file: a name, or `{name: {keywords of it}}`. The name is one of `TOOL_REGISTRY`, the dotted path of a
class, or `mcp`."""

TOOL_REGISTRY: dict[str, str | type[BaseTool]] = {}
"""Name -> class, or `module:Class` of one that is imported when it is first asked for."""


def register_tool(name: str, allow_overwrite: bool = False) -> Callable[[type[BaseTool]], type[BaseTool]]:
    """Register a tool class under `name` for task files (class decorator).

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[BaseTool]) -> type[BaseTool]:
        if name in TOOL_REGISTRY and not allow_overwrite:
            raise ValueError(
                f"a tool named {name!r} is already registered: pass allow_overwrite=True, or choose another name"
            )
        TOOL_REGISTRY[name] = cls
        return cls

    return register
