"""Published path of the trajectory."""

from skyrl_agent.agents.react import ReActTrajectory

__all__ = ["ReActTrajectory"]
