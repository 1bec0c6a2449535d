"""Classes at dotted paths, and modules that a task file imports."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from skyrl_agent.errors import ConfigError


def resolve_class(path: str, key: str) -> type[Any]:
    """Return the class at the dotted path of the task file's `key`.

    Raises:
        ConfigError: the class does not exist, or a package it needs is not installed.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or module
        why = "the module does not exist" if module == missing or module.startswith(f"{missing}.") else "not installed"
        raise ConfigError(f"{key}={path!r}: cannot import {missing}: {why}") from error
    except (AttributeError, TypeError, ValueError) as error:  # TypeError: a relative path that begins with a dot
        raise ConfigError(f"{key}={path!r} must be the dotted path of a class: {error}") from error


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register tools, dispatchers, backends or agents.

    Raises:
        ConfigError: the module does not exist or cannot be imported.
    """
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(
                f"imports: {name!r} cannot be imported: {type(error).__name__}: {error}; it must name a module on the "
                "Python path (PYTHONPATH)"
            ) from error
