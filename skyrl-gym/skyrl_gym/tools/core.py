"""Tools: methods of a `ToolGroup`, found by their `@tool` mark and called by name.

Two ways to call one. An environment that has read the arguments itself uses `execute_tool`, and errors are exceptions.
A call as a model wrote it goes through `call`, and errors are text that tells the model what to do better.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from skyrl_gym.deadline import outcome_of
from skyrl_gym.suggestions import did_you_mean
from skyrl_gym.tools.signature import ArgumentError, Schema, Signature, parse_docstring

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Function names that inference servers accept."""


class tool:
    """Mark a method of a `ToolGroup` as a tool: `@tool`, or `@tool(name=..., description=...)`.

    The method may be `async def`. Accessed on an instance it is the bound method; on the class, the `tool` object.

    Args:
        name: Name for the model; default: the method's name.
        description: Description for the model; default: the docstring up to its first section (`Args:`, ...).

    Raises:
        TypeError: it takes `*args` or `**kwargs`, or is not a method. Raised where the class is written.
        ValueError: the name is not usable by models.
    """

    def __new__(cls, func: Callable[..., object] | None = None, **options: object) -> Any:
        return super().__new__(cls) if func is not None else lambda func: cls(func, **options)

    def __init__(self, func: Callable[..., object], *, name: str | None = None, description: str | None = None):
        if not inspect.isfunction(func):
            raise TypeError(f"@tool marks a method written with def or async def; got {func!r}")
        self.func = func
        self.name = name or func.__name__
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r}: use up to 64 letters, digits, _ and -")
        self.description = description if description is not None else parse_docstring(func.__doc__).description
        self.signature = Signature(func)
        self.__doc__ = func.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)

    def schema(self) -> Schema:
        """Return the schema that OpenAI-compatible servers and chat templates take."""
        return function_schema(self.name, self.description, self.signature.schema())


def function_schema(name: str, description: str, parameters: Schema) -> Schema:
    """Make the schema of a tool in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class ToolGroup:
    """Tools that share state, under one name. Tools of base classes are tools too."""

    async_timeout: ClassVar[float] = 300.0
    """Time limit of an `async def` tool, in seconds. A `def` tool must limit its own time: a thread cannot be
    stopped.
    """

    def __init__(self, name: str):
        """Raises ValueError if two of the tools have one name."""
        self.name = name
        self._tool_registry: dict[str, Callable[..., object]] = {}
        self._marks: dict[str, tool] = {}
        for attribute in dir(type(self)):
            marked = getattr(type(self), attribute)
            if isinstance(marked, tool):
                if marked.name in self._marks:
                    raise ValueError(f"two tools of {type(self).__name__} have the name {marked.name!r}")
                self._marks[marked.name] = marked
                self._tool_registry[marked.name] = marked.__get__(self, type(self))

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., object] | None:
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the names of the tools, in alphabetical order of the methods."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, /, *args: object, **kwargs: object) -> Any:
        """Call a tool and return its result; an `async def` tool runs on an event loop that is not the caller's.

        Raises:
            ValueError: this group has no such tool.
            TimeoutError: an `async def` tool took longer than `async_timeout`.
            Exception: whatever the tool raises.
        """
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        result = found(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        from skyrl_gym.tools.background_loop import shared_loop  # asyncio is heavy for those who do not use it

        return shared_loop().run(result, self.async_timeout)

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Answer a call as a model wrote it, with text for the model whatever it wrote and whatever the tool did.

        Raises:
            InfraError: a dependency of the tool failed, which the model cannot fix.
            TypeError: the tool is written with a type hint that JSON cannot express.
        """
        if name not in self._tool_registry:
            return unknown_tool(name, self.get_tool_names())
        if not isinstance(arguments, Mapping):
            return f"Error calling {name}: the arguments must be an object with a value for each name"
        try:
            bound = self._marks[name].signature.bind(arguments)
        except ArgumentError as failure:
            return f"Error calling {name}: {failure}"
        result = outcome_of(lambda: as_text(self.execute_tool(name, **bound)))
        return f"Error in {name}: {str(result) or type(result).__name__}" if isinstance(result, Exception) else result

    def schemas(self) -> list[Schema]:
        """Return the tools in OpenAI's form, for the `tools` of a request or a chat template.

        Raises:
            TypeError: a tool has a parameter whose type hint JSON cannot express.
        """
        return [marked.schema() for marked in self._marks.values()]

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tool_registry, self.name)

    def close(self) -> None:
        """Give resources back. May be called more than once."""


def unknown_tool(name: str, known: list[str]) -> str:
    """Return the message for a model that called an unknown tool."""
    return f"Error: there is no tool {str(name)[:100]!r}; {did_you_mean(name, known)}"


def as_text(result: object) -> str:
    """Convert a tool's result to text for the model: text unchanged, None to an empty text, the rest to JSON if
    possible.
    """
    if result is None:
        return ""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)
