"""Published names of modules elsewhere."""

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.types import TrajectoryResult

__all__ = ["BaseTrajectory", "TrajectoryResult"]  # and AgentRunner, which lies above: imported when asked for


def __getattr__(name: str) -> object:
    if name == "AgentRunner":
        from skyrl_agent.runner import AgentRunner

        return AgentRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
