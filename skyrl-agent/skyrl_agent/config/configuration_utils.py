"""Published names: the settings of one trajectory, and a field of a row by its dotted path."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_agent.types import JsonObject, Row

__all__ = ["TrajectoryConfig", "get_field_from_config"]


@dataclass
class TrajectoryConfig:
    """Settings of an agent built by hand; in a task file these are `generator.*`, `agent_cls` and `tools`."""

    instance_id: str = ""
    trajectory_id: int = 0
    max_prompt_length: int = 1024
    """Tokens after the initial prompt."""
    sampling_params: JsonObject | None = None
    vision_is_active: bool = False
    qwen3_enable_thinking: bool = True
    qwen3_acc_thinking: bool = True
    max_iterations: int = 5
    tools: list[Any] | None = None
    agent_cls: str = "skyrl_agent.agents.react.ReActAgent"
    profile_tools: bool = False
    debug_log: bool = False
    early_step_threshold: int = 0
    enable_turn_reminder: bool = False


def get_field_from_config(path: str, row: Row) -> Any:
    """Return the value of a row at a dotted path.

    Raises:
        ValueError: a part of the path is missing.
    """
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(f"{path!r}: unknown key {part!r}; found: {there}")
        value = value[part]
    return value
