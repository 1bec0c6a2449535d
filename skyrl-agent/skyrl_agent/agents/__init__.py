from skyrl_agent.agents.mapping import AGENT_GENERATOR_REGISTRY, AGENT_TRAJECTORY_REGISTRY

__all__ = ["AGENT_GENERATOR_REGISTRY", "AGENT_TRAJECTORY_REGISTRY"]  # and AgentRunner: imported when asked for


def __getattr__(name: str) -> object:
    if name == "AgentRunner":
        from skyrl_agent.runner import AgentRunner

        return AgentRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
