"""An agent that works on files with a shell and an editor."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from skyrl_agent.agents.agent_trajectory import AgentTrajectory
from skyrl_agent.agents.loop import Agent
from skyrl_agent.errors import ConfigError
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tools.base import ToolEntry
from skyrl_gym.suggestions import did_you_mean

__all__ = ["CodeActAgent", "CodeActTrajectory"]

FLAGS = {
    "enable_bash": "bash",
    "enable_bash_tool": "bash",
    "enable_cmd": "bash",
    "enable_editor": "str_replace_editor",
    "enable_search": "code_search",
    "enable_think": "think",
    "enable_jupyter": "code_interpreter",
    "enable_browsing": "web_browser",
    "enable_finish": "finish",
}
"""Flag in a task file -> tool. `bash` and `finish` are there without one."""
WITHOUT_EFFECT = ("enable_llm_editor", "enable_mcp", "enable_prompt_extensions")
"""Flags of published task files: false is what they are here in any case."""


class CodeActAgent(Agent):
    """The loop over the trajectory's runtime. `tools` is a list of names or a map of flags."""

    default_tools: ClassVar[Sequence[str]] = ("bash", "str_replace_editor", "finish")

    @classmethod
    def tool_entries(cls, tools: Sequence[ToolEntry] | Mapping[str, object] | None, task: BaseTask) -> list[ToolEntry]:
        return get_tools_of_flags(tools) if isinstance(tools, Mapping) else super().tool_entries(tools, task)


def get_tools_of_flags(flags: Mapping[str, object]) -> list[ToolEntry]:
    """
    Raises:
        ConfigError: a flag is unknown, not true or false, or asks for what there is not.
    """
    chosen = {"bash": True, "finish": True}
    for flag, value in flags.items():
        if flag not in FLAGS and flag not in WITHOUT_EFFECT:
            raise ConfigError(f"unknown flag tools.{flag}; {did_you_mean(flag, FLAGS)}")
        if not isinstance(value, bool):
            raise ConfigError(f"tools.{flag} must be true or false; got {value!r}")
        if flag in FLAGS:
            chosen[FLAGS[flag]] = value
        elif value:
            raise ConfigError(f"tools.{flag}: true: CodeActAgent has no such tool; remove it")
    return [name for name, wanted in chosen.items() if wanted]


CodeActTrajectory = AgentTrajectory
