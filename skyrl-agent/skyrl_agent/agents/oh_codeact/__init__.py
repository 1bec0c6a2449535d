"""Published import path of `CodeActAgent`. Accepts OpenHands' task files and flags without OpenHands installed."""

from skyrl_agent.agents.codeact import CodeActAgent, CodeActTrajectory

__all__ = ["CodeActTrajectory", "OHCodeActAgent"]

OHCodeActAgent = CodeActAgent
