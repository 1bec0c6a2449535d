"""Tools: methods of a `ToolGroup`, found by their `@tool` mark and called by name."""

from collections.abc import Callable
from typing import Any


class tool:
    """Marks a method of a `ToolGroup` as a tool. Through an instance it is the bound method."""

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.name = func.__name__
        self.__doc__ = func.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Tools that share state, under one name. Tools of base classes are tools too."""

    def __init__(self, name: str):
        self.name = name
        self._tool_registry: dict[str, Callable[..., Any]] = {}
        for attribute in dir(type(self)):
            marked = getattr(type(self), attribute)
            if isinstance(marked, tool):
                self._tool_registry[marked.name] = marked.__get__(self, type(self))

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """In alphabetical order."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError if this group has no such tool; what the tool raises reaches the caller."""
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tool_registry, self.name)
