"""What the parts of this package hand to each other. Imports nothing of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content`; an assistant's may have `tool_calls`, a tool's `name`, `tool_call_id`."""

Row = Mapping[str, Any]
"""A dataset row."""

Stage = Literal["initialize", "generate", "evaluate"]
"""The three stages of a trajectory's life. Published names of their methods: `initialize_trajectory`, ..."""


class MetaInfo(TypedDict):
    """What a backend says of an answer beside its text."""

    output_tokens: list[int] | None
    """The very ids that the model wrote; None where a server does not tell."""
    finish_reason: str
    """`stop` (end of turn, stop string), `length` (budget used up), `abort`."""
    logprobs: list[float] | None
    """One a token of `output_tokens`; None where there are none. Never zeros in their place."""
    weight_versions: NotRequired[list[int] | None]


class InferBackend(Protocol):
    """The model, as an agent sees it."""

    async def async_generate_ids(
        self, *, input_ids: list[int], sampling_params: Mapping[str, Any], request_id: str
    ) -> tuple[str, MetaInfo]:
        """Continues `input_ids`. `request_id` is the same for all turns of an agent (sticky routing).

        Raises:
            InfraError: the server failed or did not answer in time.
            BackendError: it refused the request.
        """
        ...


@runtime_checkable
class Probeable(Protocol):
    """Something that can be tried before a run, in seconds."""

    async def probe(self) -> None:
        """
        Raises:
            InfraError, ConfigError: it does not work; the text names the setting.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """Why a trajectory failed."""

    stage: Stage
    kind: Literal["model", "tool", "environment", "reward", "infrastructure"]
    message: str
    attempts: int = 1


@dataclass
class ToolCallRecord:
    """A call that an agent made, for the trajectory's row on disk."""

    name: str
    arguments: dict[str, Any]
    output: str
    seconds: float
    step: int
    ok: bool = True
    call_id: str | None = None


@dataclass
class TrajectoryResult:
    """What became of one trajectory. `transitions` is what trains; `messages` is for people."""

    instance_id: str = ""
    trajectory_id: int = 0
    data_source: str = "default"
    messages: list[Message] = field(default_factory=list)
    transitions: list[Any] = field(default_factory=list)
    """`functional.utils.Transition`s of the agent and its sub-agents; empty where only messages are known."""
    results: Any = None
    """The agent's answer: text, a patch, ..."""
    state: Any = None
    finish_reason: str | None = None
    reward: float | None = None
    """None: there is none, because the trajectory failed."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    """The first one."""
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    num_steps: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """`initialize`, `generate`, `evaluate`, and `queue_<stage>` before each."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def finish(self) -> bool:
        return self.finish_reason in ("FINISH_TOOL", "FINISH")
