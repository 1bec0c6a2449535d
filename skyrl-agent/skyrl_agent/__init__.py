"""Long-horizon agents as rollouts. Importing it imports no trainer, opens nothing and reads no environment variable."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_agent.auto import AutoAgentRunner

__all__ = ["AutoAgentRunner"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from skyrl_agent.auto import AutoAgentRunner

        return AutoAgentRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
