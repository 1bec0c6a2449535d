"""Published path of the agent."""

from skyrl_agent.agents.oh_codeact import OHCodeActAgent

__all__ = ["OHCodeActAgent"]
