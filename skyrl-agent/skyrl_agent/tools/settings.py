"""Settings that a task file or the environment may give. Read when a tool is made, never at import."""

import os

from skyrl_agent.errors import ConfigError


def setting(given: str | None, *variables: str) -> str | None:
    """Return the task file's value, else the first environment variable that is not empty."""
    return given or next((value for name in variables if (value := os.environ.get(name, "").strip())), None)


def required(tool: str, name: str, given: str | None, *variables: str) -> str:
    """Return a value that must exist; see `setting`.

    Raises:
        ConfigError: neither is set.
    """
    value = setting(given, *variables)
    if value is None:
        raise ConfigError(
            f"tool {tool} needs the environment variable {' or '.join(variables)}, or the setting "
            f"`{name}` (tools: [{{{tool}: {{{name}: ...}}}}])"
        )
    return value


def get_setting_list(given: list[str] | None, *variables: str) -> list[str]:
    """Return a list; see `setting`. The environment's is separated by commas."""
    if given is not None:
        return given
    return [item.strip() for item in (setting(None, *variables) or "").split(",") if item.strip()]
