"""Published import path of `CodeActAgent`. Task files and flags are OpenHands'; OpenHands need not be installed."""

from skyrl_agent.agents.codeact import CodeActAgent, CodeActTrajectory

__all__ = ["CodeActTrajectory", "OHCodeActAgent"]

OHCodeActAgent = CodeActAgent
