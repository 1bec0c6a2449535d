"""A door to what lives elsewhere, under the names that users' code imports."""

from typing import Any

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.types import TrajectoryResult

__all__ = ["BaseTrajectory", "TrajectoryResult"]  # and AgentRunner, which lies above: imported when asked for


def __getattr__(name: str) -> Any:
    if name == "AgentRunner":
        from skyrl_agent.runner import AgentRunner

        return AgentRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
