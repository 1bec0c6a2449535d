"""Environments that talk: chat messages out, the model's text in."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, NotRequired, TypeVar, cast

from skyrl_gym.core import Env, EnvStepOutput
from skyrl_gym.deadline import outcome_of
from skyrl_gym.error import TaskError
from skyrl_gym.finite_numbers import default_aggregate_metrics
from skyrl_gym.suggestions import did_you_mean
from skyrl_gym.tools.core import ToolGroup

MessageType = dict[str, Any]
"""One chat message: `role`, `content` (text, or a list of typed parts), and what else the chat template reads."""

ConversationType = list[MessageType]


NumberT = TypeVar("NumberT", int, None)


class BaseTextEnvStepOutput(EnvStepOutput[ConversationType]):
    """Output of one step of a text environment; a plain dict at run time.

    `observations` are the messages that answer the model: none if the episode is over.
    """

    truncated: NotRequired[bool]
    """The episode ended because of a limit (turns, time), not because the task did. Only together with `done`."""

    postprocessed_action: NotRequired[str | None]
    """Stands in for the model's text. It is encoded anew, so the model is trained on tokens it did not write: avoid."""


@dataclass(frozen=True)
class Example:
    """A task with a known good solution: what `check_env` and the audit try an environment on."""

    prompt: ConversationType
    extras: dict[str, Any]
    """The dataset row's other columns."""
    oracle: list[str]
    """Texts of a perfect model, one per turn, which earn the highest outcome reward."""
    env_config: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def ruled(cls, question: str, ground_truth: object, *oracle: str, **columns: object) -> "Example":
        """Make an example with one user message and a rule-based reward over its ground truth."""
        extras = {"reward_spec": {"method": "rule", "ground_truth": ground_truth}, **columns}
        return cls([{"role": "user", "content": question}], extras, list(oracle))


class BaseTextEnv(Env[ConversationType, str]):
    """Base of the text environments. A subclass defines `step`, increments `turns` first thing in it, and compares it
    with `max_turns`.

    `init`, `step` and `close` may be `async def`. `init` may take a second argument `seed` (an int or None): an episode
    of an environment that does is the same for the same seed and actions.

    What the model wrote is never the reason for an exception: it is answered or scored. An exception means a wrong
    dataset row (`TaskError`), a broken environment, or a broken service (`InfraError`).
    """

    config_class: ClassVar[type | None] = None
    """The dataclass of this environment's settings (`environment.skyrl_gym.<id>.*`), if it has any."""

    @staticmethod
    def render_html(row: Mapping[str, Any]) -> str | None:
        """Render a trajectory as an HTML fragment, or return None (the default). The dashboard shows it in a frame
        without scripts and external resources. Escape the model's text (`html.escape`).

        Args:
            row: a row of a run's trajectories file: prompt, response, reward, tokens …
        """
        return None

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init_tool_groups(self, tool_groups: list[ToolGroup] | None = None) -> None:
        """Give the environment its tools. Raises ValueError if two groups have a tool of the same name."""
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

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[object]) -> Any:
        """Call a tool with `tool_input` as its positional arguments and return its result."""
        if not isinstance(tool_input, list | tuple):
            raise TypeError(f"tool_input must be a list or tuple of arguments; got {type(tool_input).__name__}")
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"ToolGroup '{tool_group_name}' not found.")

    def _observe_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[object]) -> str:
        """Call a tool. Returns its result, or the text of its exception: a failing tool does not end the episode.

        Raises:
            InfraError: a service that the tool requires does not work.
        """
        return str(outcome_of(self._execute_tool, tool_group_name, tool_name, tool_input))

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        """Start the episode. May rewrite the prompt; the list returned becomes the chat history."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Process the model's text of one turn: observations and a reward, which is a float in every step."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def close(self) -> None:
        """Give resources back. May be called more than once."""

    def get_metrics(self) -> dict[str, object]:
        """Numbers about this episode; read once, after its last step.

        An environment that pays for more than success (a format bonus, say) reports the part that is for success as
        `outcome_reward`.
        """
        return {}

    @classmethod
    def examples(cls) -> list[Example]:
        """Return small tasks with their solutions, without network or data files."""
        return []

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, object]]) -> dict[str, Any]:
        """Make one set of numbers of the `get_metrics` of many episodes."""
        return default_aggregate_metrics(metrics)


def text_of(message: MessageType) -> str:
    """Return the text of a message; of one with typed parts, the text parts joined by newlines."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)


def last_user_text(prompt: ConversationType) -> str:
    """Return the text of the last user message, or an empty string."""
    return next((text_of(message) for message in reversed(prompt) if message["role"] == "user"), "")


def with_user_text(prompt: ConversationType, text: str) -> ConversationType:
    """Append a text to the last message of a prompt if that is a user message with text, else add a user message."""
    messages = list(prompt)
    if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        text = f"{messages.pop()['content']}\n\n{text}"
    return [*messages, {"role": "user", "content": text}]


def ground_truth_of(extras: dict[str, object], spec_field: str = "reward_spec") -> Any:
    """Return the expected answer of a dataset row: `reward_spec.ground_truth`. Raises TaskError if it is not there."""
    spec = required(extras, spec_field)
    if not isinstance(spec, Mapping) or "ground_truth" not in spec:
        raise TaskError(f"ground_truth is required in {spec_field} field; got {spec!r:.200}")
    return spec["ground_truth"]


def required(extras: Mapping[str, object], name: str) -> Any:
    """Return a required column. Raises TaskError if it is not there."""
    if extras.get(name) is None:
        raise TaskError(f"{name} field is required; the row has {', '.join(sorted(extras)) or 'no columns'}")
    return extras[name]


def mapping_of(name: str, value: object) -> dict[str, Any]:
    """Return a column that contains a mapping or its JSON text; None is an empty one. Raises TaskError."""
    rule = f"{name} must be a mapping or its JSON text"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as mistake:
            raise TaskError(f"{rule}: {mistake}; got {value!r:.200}") from None
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(f"{rule}; got {value!r:.200}")
    return dict(value or {})


def max_turns_of(extras: Mapping[str, object], default: int) -> int:
    """Return a row's `max_turns`. Raises TaskError if it is no whole number from 1 on."""
    return whole_number(extras, "max_turns", default, least=1)


def whole_number(extras: Mapping[str, object], name: str, default: NumberT, least: int = 0) -> int | NumberT:
    """Return a whole-number column, or the default. Raises TaskError if it is no whole number or too small."""
    value = extras.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Integral | float) or value % 1 != 0 or value < least:
        raise TaskError(f"{name} must be an integer of at least {least}; got {value!r:.200}")
    return int(value)


ConfigT = TypeVar("ConfigT")


def typed_config(config_class: type[ConfigT], env_config: object) -> ConfigT:
    """Convert an environment's settings (None, a mapping, a DictConfig or the dataclass itself) to its dataclass.

    The key `env_class` is ignored: callers pass the section that also names the environment.

    Raises:
        ValueError: unknown setting; the text names the nearest one.
    """
    if isinstance(env_config, config_class):
        return env_config
    settings: dict[str, object] = {}
    if dataclasses.is_dataclass(env_config):
        settings = vars(env_config)
    elif env_config is not None:
        given = cast(Mapping[str, object], env_config)
        settings = {str(name): given[name] for name in given}
        settings.pop("env_class", None)
    known = [each.name for each in dataclasses.fields(cast(Any, config_class))]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{config_class.__name__} has no setting {name!r}; {hint}")
    return config_class(**settings)
