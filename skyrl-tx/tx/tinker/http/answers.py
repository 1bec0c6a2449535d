"""What endpoints answer, for the server's own description (OpenAPI) of them. The desk makes the answers; a test holds
that they are of these shapes."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer may hold more than is said here."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Problem(Answer):
    """A refusal: field, value, rule, and what to do."""

    detail: str


class Health(Answer):
    status: Literal["ok"]


class SupportedModel(Answer):
    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class Capabilities(Answer):
    supported_models: list[SupportedModel]


class Flags(Answer):
    """Names of flags and their values."""


class Accepted(Answer):
    """The request is recorded; `retrieve_future` has its result once there is one."""

    request_id: str
    model_id: str | None = None


class SampleAccepted(Accepted):
    sample_sequence_ids: list[str]
    """One a sample."""


class SessionMade(Answer):
    session_id: str
    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class Heartbeat(Answer):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Nothing(Answer):
    """Done."""


class Sessions(Answer):
    sessions: list[str]


class Session(Answer):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class ModelData(Answer):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class ModelInfo(Answer):
    model_id: str
    model_data: ModelData
    type: Literal["get_info"] = "get_info"
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class SamplingSessionMade(Answer):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class Sampler(Answer):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class TryAgainLater(Answer):
    """Not finished: ask once more."""

    type: Literal["try_again"]
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None = None


class WeightsInfo(Answer):
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class Cursor(Answer):
    offset: int
    limit: int
    total_count: int


class Checkpoint(Answer):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Answer):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRuns(Answer):
    training_runs: list[TrainingRun]
    cursor: Cursor


class FileAddresses(Answer):
    urls: dict[str, str]
    """By the file's path in the checkpoint."""
    expires: datetime


class TelemetryTaken(Answer):
    status: Literal["accepted"]
