"""Questions with a number as answer, and two tools to find it: a search engine and Python."""

from dataclasses import dataclass
from typing import get_args

from skyrl_gym.chat.tool_calls import CallSyntax, ToolCall, parse_tool_calls
from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    ground_truth_of,
    max_turns_of,
    typed_config,
)
from skyrl_gym.graders import Invalid, reward_of
from skyrl_gym.graders.math import grade_number
from skyrl_gym.tags import has_tags
from skyrl_gym.tools.core import ToolGroup
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup
from skyrl_gym.tools.search import SearchSettings

DEFAULT_MAX_TURNS = 2

NO_CALL = {
    "xml": "No <tool>...</tool> block found. Call a tool as <tool><name>argument</name></tool>, with its name.",
    "hermes": 'No tool call found. Write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.',
    "llama3_json": 'No tool call found. Write {"name": ..., "parameters": {...}} and nothing else.',
    "gpt_oss": "No tool call found. Send a message to functions.NAME, with the tool's name.",
}
HOW_TO_END = " Give your final answer as <solution>#### NUMBER</solution>."


@dataclass
class SearchCodeEnvConfig(SearchSettings):
    """Settings of the `searchcode` environment."""

    python_timeout: float = 10.0
    """Time limit of one Python program, in seconds."""
    tool_call_format: CallSyntax = "xml"
    """Format of tool calls. `xml`: `<tool><name>argument</name></tool>`, one per turn. The others are the models'
    native formats, in which every call of a turn is answered by a message of the role `tool`."""

    def __post_init__(self) -> None:
        if self.tool_call_format not in get_args(CallSyntax):
            raise ValueError(
                f"tool_call_format must be one of {', '.join(get_args(CallSyntax))}; got {self.tool_call_format!r}"
            )


class SearchCodeEnv(BaseTextEnv):
    """Mathematics with search and code tools. Tool calls return the result or the error of the call; a `<solution>`
    ends the episode: reward 1 if the number after the first `#### ` of the model is the ground truth, else 0.

    The last of `max_turns` turns (from the extras, default 2) ends the episode in any case. Only the model's text is
    graded. A failing retrieval server or sandbox raises `InfraError`.
    """

    config_class = SearchCodeEnvConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        config = typed_config(SearchCodeEnvConfig, env_config)
        extras = extras or {}
        self.ground_truth = str(ground_truth_of(extras))
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        self.format: CallSyntax = config.tool_call_format
        self.num_calls = 0
        self.chat_history: ConversationType = []
        """Messages of this episode after the prompt."""
        self.init_tool_groups([config.tool_group(), PythonCodeExecutorToolGroup(timeout=config.python_timeout)])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self._is_done(action):
            return BaseTextEnvStepOutput(
                observations=[],
                reward=self._get_reward(),
                done=True,
                metadata={},
                truncated=not has_tags(action, "solution"),
            )
        observations = self._run_calls(action)
        self.chat_history += observations
        return BaseTextEnvStepOutput(
            observations=observations, reward=0.0, done=False, metadata=self._make_metadata(action)
        )

    def _is_done(self, action: str) -> bool:
        return self.turns >= self.max_turns or has_tags(action, "solution")

    def _parse_calls(self, action: str) -> list[ToolCall | Invalid]:
        calls = parse_tool_calls(action, self.format)
        if not calls:
            return [Invalid(NO_CALL[self.format] + HOW_TO_END)]
        return calls[:1] if self.format == "xml" else calls

    def _group_of(self, call: ToolCall | Invalid) -> ToolGroup:
        """Raises ValueError, for the model to read."""
        if isinstance(call, Invalid):
            raise ValueError(call.reason)
        for group in self.tool_groups:
            if group.get_tool(call.name) is not None:
                return group
        raise ValueError(f"Tool {call.name[:100]!r} not found; there are {', '.join(sorted(self.tool_to_toolgroup))}.")

    def _parse_action(self, action: str) -> tuple[str, str, list[object]]:
        """Group, tool and arguments of the first call. Raises ValueError, for the model to read."""
        call = self._parse_calls(action)[0]
        group = self._group_of(call)
        assert isinstance(call, ToolCall)
        return group.name, call.name, list(call.arguments.values())

    def _run_calls(self, action: str) -> ConversationType:
        """Return a message for each call; none where a tool has nothing to say."""
        role = "user" if self.format == "xml" else "tool"
        texts = [self._run_call(call) for call in self._parse_calls(action)]
        return [{"role": role, "content": text} for text in texts if text]

    def _run_call(self, call: ToolCall | Invalid) -> str:
        try:
            group = self._group_of(call)
        except ValueError as mistake:
            return str(mistake)
        assert isinstance(call, ToolCall)
        self.num_calls += 1
        return group.call(call.name, call.arguments)

    def _make_metadata(self, action: str) -> dict[str, object]:
        try:
            tool_group, tool_name, tool_input = self._parse_action(action)
        except ValueError:
            tool_group, tool_name, tool_input = None, None, None
        tools = [group.get_tool_names() for group in self.tool_groups]
        return {"tool_group": tool_group, "tool_name": tool_name, "tool_input": tool_input, "tools": tools}

    def _get_reward(self) -> float:
        written = "\n".join(message["content"] for message in self.chat_history if message["role"] == "assistant")
        return reward_of(grade_number(written, self.ground_truth))

    def get_metrics(self) -> dict[str, object]:
        return {"turns": self.turns, "tool_calls": self.num_calls}

    def close(self) -> None:
        for group in self.tool_groups:
            group.close()

    @classmethod
    def examples(cls) -> list[Example]:
        from skyrl_gym.envs.searchcode.examples import make_examples

        return make_examples()
