"""The published path. The agent behind it is our own `CodeActAgent`, not OpenHands': same task files, same flags, and
no need for OpenHands to be installed."""

from skyrl_agent.agents.codeact import CodeActAgent, CodeActTrajectory

__all__ = ["CodeActTrajectory", "OHCodeActAgent"]

OHCodeActAgent = CodeActAgent
