"""Registry of agents: the runner and the trajectory of each. A class that they do not name is found by
its dotted path."""

from typing import Any

from skyrl_agent.dotted_paths import resolve_class
from skyrl_agent.errors import ConfigError
from skyrl_gym.suggestions import did_you_mean

__all__ = ["AGENT_GENERATOR_REGISTRY", "AGENT_TRAJECTORY_REGISTRY", "resolve_agent_class", "resolve_class"]

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


def resolve_agent_class(agent_cls: str, registry: dict[str, str | type]) -> type[Any]:
    """
    Raises:
        ConfigError: the agent is unknown, or a package it needs is not installed.
    """
    found = registry.get(agent_cls)
    if found is None:
        found = _find_unregistered(agent_cls, registry)
    return resolve_class(found, "agent_cls") if isinstance(found, str) else found


def _find_unregistered(agent_cls: str, registry: dict[str, str | type]) -> str | type[Any]:
    """Return the runner or the trajectory for an unregistered class, by its type."""
    try:
        own = resolve_class(agent_cls, "agent_cls")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; {did_you_mean(agent_cls, registry)} (for a custom agent: the dotted path of a subclass of "
            "skyrl_agent.agents.loop.Agent or skyrl_agent.agents.trajectory.BaseTrajectory)"
        ) from error
    if registry is AGENT_GENERATOR_REGISTRY:
        return _RUNNER
    from skyrl_agent.agents.trajectory import BaseTrajectory

    if isinstance(own, type) and issubclass(own, BaseTrajectory):
        return own
    from skyrl_agent.agents.loop import Agent

    if isinstance(own, type) and issubclass(own, Agent):
        return "skyrl_agent.agents.agent_trajectory.AgentTrajectory"
    raise ConfigError(
        f"agent_cls={agent_cls!r} must be a subclass of skyrl_agent.agents.loop.Agent or of "
        f"skyrl_agent.agents.trajectory.BaseTrajectory; got {own!r}"
    )
