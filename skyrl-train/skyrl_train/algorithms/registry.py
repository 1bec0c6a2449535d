"""Named functions: how a setting such as `policy_loss_type=regular` becomes code, and how users add their own."""

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


class Registry(Generic[Function]):
    """Functions by name. A process's own: what a run uses is looked up once, in the driver, and shipped to the workers.

    Args:
        noun: what the functions are, for error messages ("policy loss").
    """

    def __init__(self, noun: str):
        self._noun = noun
        self._functions: dict[str, Function] = {}

    def register(self, name: str, function: Function) -> None:
        """Raises ValueError if the name is taken: a silent replacement would change other people's runs."""
        if name in self._functions:
            raise ValueError(f"{self._noun} '{name}' is already registered; choose another name or unregister it first")
        self._functions[name] = function

    def unregister(self, name: str) -> None:
        """Raises ValueError if there is no such name."""
        self.get(name)
        del self._functions[name]

    def get(self, name: str) -> Function:
        """Raises ValueError with the known names if there is no such name."""
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise ValueError(
                f"Unknown {self._noun} '{name}': not registered{hint} Available: {', '.join(self.list_available())}"
            )
        return self._functions[name]

    def list_available(self) -> list[str]:
        return sorted(self._functions)

    def decorator(self, name: str) -> Callable[[Function], Function]:
        """`register` as a decorator, which leaves the function as it is."""

        def keep(function: Function) -> Function:
            self.register(name, function)
            return function

        return keep

    def __contains__(self, name: str) -> bool:
        return name in self._functions
