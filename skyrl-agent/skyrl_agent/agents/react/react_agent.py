"""Published path of the agent."""

from skyrl_agent.agents.react import ReActAgent

__all__ = ["ReActAgent"]
