"""Environments that talk: chat messages out, the model's text in."""

from typing import Any, NotRequired

from skyrl_gym.core import Env, EnvStepOutput
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.tools.core import ToolGroup

MessageType = dict[str, Any]
"""One chat message: `role`, `content` (text, or a list of typed parts), and what else the chat template reads."""

ConversationType = list[MessageType]


class BaseTextEnvStepOutput(EnvStepOutput[ConversationType]):
    """What one step of a text environment gives back; a plain dict at run time.

    `observations` are the messages that answer the model: none if the episode is over.
    """

    postprocessed_action: NotRequired[str | None]
    """Stands in for the model's text. It is encoded anew, so the model is trained on tokens it did not write: avoid."""


class BaseTextEnv(Env[ConversationType, str]):
    """Base of the text environments. A subclass defines `step`, increments `turns` first thing in it, and compares it
    with `max_turns`."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init_tool_groups(self, tool_groups: list[ToolGroup] | None = None) -> None:
        """Gives the environment its tools. Raises ValueError if two groups have a tool of the same name."""
        self.tool_groups = list(tool_groups or [])
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            for tool_name, group_name in group.get_tool_to_group_mapping().items():
                if tool_name in self.tool_to_toolgroup:
                    raise ValueError(
                        f"tool {tool_name!r} is in two groups, {self.tool_to_toolgroup[tool_name]} and {group_name}; "
                        f"tool names must be unique within an environment"
                    )
                self.tool_to_toolgroup[tool_name] = group_name

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: list[Any] | tuple[Any, ...]) -> Any:
        """Calls a tool with `tool_input` as its positional arguments and returns what it returns."""
        if not isinstance(tool_input, list | tuple):
            raise TypeError(f"tool_input must be a list or tuple of arguments; got {type(tool_input).__name__}")
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"ToolGroup '{tool_group_name}' not found.")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Starts the episode. May rewrite the prompt; the list returned becomes the chat history."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answers what the model wrote in this turn, and judges it. `reward` is a float in every step."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def close(self) -> None:
        """Gives resources back. May be called more than once."""

    def get_metrics(self) -> dict[str, Any]:
        """Numbers about this episode; read once, after its last step."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes one set of numbers of the `get_metrics` of many episodes."""
        return default_aggregate_metrics(metrics)


def ground_truth_of(extras: dict[str, Any]) -> Any:
    """The expected answer of a dataset row: `reward_spec.ground_truth`. Asserts that it is there."""
    assert "reward_spec" in extras, "reward_spec field is required"
    assert "ground_truth" in extras["reward_spec"], "ground_truth is required in reward_spec field"
    return extras["reward_spec"]["ground_truth"]
