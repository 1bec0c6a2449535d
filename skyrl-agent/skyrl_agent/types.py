"""Types shared by the parts of this package. Imports only the chat layer."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

from skyrl_gym.chat.template import ChatTokenizer, Message

__all__ = [
    "Announceable",
    "Failure",
    "InferBackend",
    "JsonObject",
    "Message",
    "MetaInfo",
    "Probeable",
    "Row",
    "SamplingParams",
    "Stage",
    "Tokenizer",
    "ToolCallRecord",
    "TrajectoryResult",
]


class Tokenizer(ChatTokenizer, Protocol):
    """Tokenizer interface, as transformers implement it."""

    eos_token: Any
    eos_token_id: int | None
    added_tokens_decoder: Mapping[int, Any]


JsonObject = dict[str, Any]

Row = Mapping[str, Any]
"""A dataset row."""

SamplingParams = Mapping[str, Any]

Stage = Literal["initialize", "generate", "evaluate"]
"""The three stages of a trajectory's life. Published names of their methods: `initialize_trajectory`, ..."""


class MetaInfo(TypedDict):
    """Metadata of a reply."""

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
        self, *, input_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> tuple[str, MetaInfo]:
        """Generate the continuation of `input_ids`. `request_id` is the same for all turns of an agent (sticky
        routing).

        Raises:
            InfraError: the server failed or timed out.
            BackendError: it refused the request.
        """
        ...


@runtime_checkable
class Announceable(Protocol):
    """Backend that needs the `request_id`s of a batch before the requests."""

    def announced(self, groups: Sequence[Sequence[str]]) -> AbstractContextManager[None]:
        """Announce expected ids while the context is open. `groups`: ids of requests with the same prompt."""
        ...


@runtime_checkable
class Probeable(Protocol):
    """Service that can be checked before a run, in seconds."""

    async def probe(self) -> None:
        """
        Raises:
            InfraError, ConfigError: it does not work; the text names the setting.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """Cause of a trajectory's failure."""

    stage: Stage
    kind: Literal["model", "tool", "environment", "reward", "infrastructure"]
    message: str
    attempts: int = 1


@dataclass
class ToolCallRecord:
    """A call that an agent made, for the trajectory's row on disk."""

    name: str
    arguments: JsonObject
    output: str
    seconds: float
    step: int
    ok: bool = True
    call_id: str | None = None


@dataclass
class SandboxCommand:
    """A command in a trajectory's runtime, for the trajectory's row on disk."""

    stage: Stage
    command: str
    stdout: str
    stderr: str
    outcome: str
    """Outcome of `skyrl_gym.sandbox.ExecResult`; `infrastructure`: the runtime failed; `omitted`: the entry stands for
    commands that the log does not hold."""
    returncode: int
    seconds: float


@dataclass
class TrajectoryResult:
    """Result of one trajectory. `transitions` is trained on; `messages` is for people."""

    instance_id: str = ""
    trajectory_id: int = 0
    data_source: str = "default"
    messages: list[Message] = field(default_factory=list)
    transitions: list[Any] = field(default_factory=list)
    """`chat.transitions.Transition`s of the agent and its sub-agents; empty where only messages are known."""
    results: Any = None
    """The agent's answer: text, a patch, ..."""
    state: object = None
    finish_reason: str | None = None
    reward: float | None = None
    """None: there is none, because the trajectory failed."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    """The first one."""
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    sandbox: list[SandboxCommand] = field(default_factory=list)
    """Commands in its runtimes, by tools, task and evaluation, with the ends of their outputs."""
    num_steps: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """`initialize`, `generate`, `evaluate`, and `queue_<stage>` before each."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def finish(self) -> bool:
        return self.finish_reason in ("FINISH_TOOL", "FINISH")
