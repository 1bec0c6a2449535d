"""Published names of modules elsewhere."""

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.types import TrajectoryResult

__all__ = ["BaseTrajectory", "TrajectoryResult"]  # and AgentRunner, which is in a higher layer: imported on first use


def __getattr__(name: str) -> object:
    if name == "AgentRunner":
        from skyrl_agent.runner import AgentRunner

        return AgentRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
