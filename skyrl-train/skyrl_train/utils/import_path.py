"""Import of user-defined functions and classes that settings name."""

from importlib import import_module
from typing import Any

from skyrl_train.errors import ConfigError


def import_object(setting: str, path: str) -> Any:
    """Import `package.module:name` or `package.module.name`. Hydra parses a list of unquoted paths only in the second
    form.

    Args:
        setting: name of the setting, for the error.

    Raises:
        ConfigError: the module cannot be imported, or lacks the name.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{setting}={path!r} must be package.module:name or package.module.name, importable here (see PYTHONPATH): "
            f"{error}"
        ) from error
