"""ReAct agent (https://arxiv.org/abs/2210.03629): the plain loop with the tools named in the task file."""

from skyrl_agent.agents.agent_trajectory import AgentTrajectory
from skyrl_agent.agents.loop import Agent

__all__ = ["ReActAgent", "ReActTrajectory"]


class ReActAgent(Agent):
    """`ReActAgent(traj_config, infer_engine, tokenizer)`; `await run(messages)` gives (finish_reason, result)."""


ReActTrajectory = AgentTrajectory
