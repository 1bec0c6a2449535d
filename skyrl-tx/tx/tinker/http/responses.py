"""Response schemas for the OpenAPI description. The service makes the responses; a test checks that they match."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict


class ResponseBody(BaseModel):
    """Base of response models; responses may have additional fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Problem(ResponseBody):
    """A refusal: field, value, rule, and what to do."""

    detail: str


class Health(ResponseBody):
    status: Literal["ok"]


class SupportedModel(ResponseBody):
    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class Capabilities(ResponseBody):
    supported_models: list[SupportedModel]


class Flags(ResponseBody):
    """Names of flags and their values."""


class Accepted(ResponseBody):
    """The request is recorded; `retrieve_future` has its result once there is one."""

    request_id: str
    model_id: str | None = None


class SampleAccepted(Accepted):
    sample_sequence_ids: list[str]
    """One a sample."""


class SessionMade(ResponseBody):
    session_id: str
    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class Heartbeat(ResponseBody):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Nothing(ResponseBody):
    """Done."""


class SessionList(ResponseBody):
    sessions: list[str]


class SessionInfo(ResponseBody):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, object] | None = None
    display_name: str | None = None


class ModelData(ResponseBody):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class ModelInfo(ResponseBody):
    model_id: str
    model_data: ModelData
    type: Literal["get_info"] = "get_info"
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class SamplingSessionMade(ResponseBody):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplerInfo(ResponseBody):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class TryAgainLater(ResponseBody):
    """Not finished: ask once more."""

    type: Literal["try_again"]
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None = None


class WeightsInfo(ResponseBody):
    """Description of a checkpoint's adapter."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class Cursor(ResponseBody):
    """Position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(ResponseBody):
    """Description of a checkpoint."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointList(ResponseBody):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(ResponseBody):
    """Description of a training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, object] | None = None


class TrainingRuns(ResponseBody):
    training_runs: list[TrainingRun]
    cursor: Cursor


class FileAddresses(ResponseBody):
    urls: dict[str, str]
    """URLs by the file's path in the checkpoint."""
    expires: datetime


class TelemetryTaken(ResponseBody):
    status: Literal["accepted"]
