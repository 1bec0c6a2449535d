"""Registry of agents: the runner and the trajectory of each. A new agent is an entry (class or dotted path) in both."""

from importlib import import_module
from typing import Any

from skyrl_agent.errors import ConfigError
from skyrl_gym.suggestions import did_you_mean

__all__ = ["AGENT_GENERATOR_REGISTRY", "AGENT_TRAJECTORY_REGISTRY", "class_of_agent"]

_RUNNER = "skyrl_agent.agents.base.AgentRunner"

AGENT_GENERATOR_REGISTRY: dict[str, str | type] = {
    "skyrl_agent.agents.react.ReActAgent": _RUNNER,
    "skyrl_agent.agents.codeact.CodeActAgent": _RUNNER,
    "skyrl_agent.agents.oh_codeact.OHCodeActAgent": _RUNNER,
}
AGENT_TRAJECTORY_REGISTRY: dict[str, str | type] = {
    "skyrl_agent.agents.react.ReActAgent": "skyrl_agent.agents.react.ReActTrajectory",
    "skyrl_agent.agents.codeact.CodeActAgent": "skyrl_agent.agents.codeact.CodeActTrajectory",
    "skyrl_agent.agents.oh_codeact.OHCodeActAgent": "skyrl_agent.agents.oh_codeact.CodeActTrajectory",
}


def class_of_agent(agent_cls: str, registry: dict[str, str | type]) -> type[Any]:
    """
    Raises:
        ConfigError: there is no such agent, or what it needs is not installed.
    """
    if agent_cls not in registry:
        raise ConfigError(
            f"agent_cls={agent_cls!r} is not registered; {did_you_mean(agent_cls, registry)} "
            "(an agent of your own: an entry in "
            "AGENT_TRAJECTORY_REGISTRY and AGENT_GENERATOR_REGISTRY of skyrl_agent.agents.mapping)"
        )
    found = registry[agent_cls]
    return class_at(found, "agent_cls") if isinstance(found, str) else found


def class_at(path: str, key: str) -> type[Any]:
    """The class at a dotted path that a task file gives under `key`.

    Raises:
        ConfigError: there is none, or what it needs is not installed.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or module
        why = "there is no such module" if module == missing or module.startswith(f"{missing}.") else "not installed"
        raise ConfigError(f"{key}={path!r}: cannot import {missing}: {why}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path!r} must be the dotted path of a class: {error}") from error
