"""Published path of the trajectory."""

from skyrl_agent.agents.oh_codeact import CodeActTrajectory

__all__ = ["CodeActTrajectory"]
