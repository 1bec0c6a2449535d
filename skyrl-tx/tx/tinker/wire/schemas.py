"""Schemas of JSON request bodies: structure and types. `checks` validates what depends on the model.

An unknown field is refused with the nearest name if it has an effect; unset fields of newer clients (null, false, 0,
empty) are accepted, since clients send their defaults.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol, Self

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from skyrl_gym.suggestions import did_you_mean
from tx.errors import RequestError
from tx.tinker.types import AdamParams, LoraSpec, PromptTargets, SampleParams, SampleSpec
from tx.tinker.wire.tensors import JsonTensor, TensorReader

Name = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]*$")]
"""An id, a name, a path: without control characters, which databases and logs do not take."""
Seq = Annotated[int, Field(ge=1, le=2**31 - 1)]
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 365 * 86400)]
"""An hour to ten years."""
MAX_METADATA_BYTES = 65_536


class Body(BaseModel):
    """A request. Types are strict: "5" is no number, true is no 1."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value:
                hint = did_you_mean(name, type(self).model_fields)
                raise ValueError(f"field {name[:80]!r} is unknown to this server; {hint}")
        return self


class LenientBody(BaseModel):
    """Request that is only recorded and accepts any fields."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


def _validate_storable(value: dict[str, object] | None) -> dict[str, object] | None:
    """Metadata that a database can hold."""
    try:
        size = len(orjson.dumps(value))  # no half surrogate pairs, no integers of more than 64 bits
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"must be at most {MAX_METADATA_BYTES} bytes as JSON; got {size}")
    if "\\u0000" in text.replace("\\\\", ""):
        raise ValueError("must not contain the NUL character")
    return value


# ---- sessions


class ClientConfigRequest(LenientBody):
    sdk_version: str | None = None


class CreateSessionRequest(LenientBody):
    tags: list[Name] = Field(default_factory=list, max_length=256)
    user_metadata: dict[str, object] | None = None
    sdk_version: Name | None = None
    project_id: Name | None = None
    display_name: Name | None = None

    _validate_storable = field_validator("user_metadata")(_validate_storable)


class SessionHeartbeatRequest(LenientBody):
    session_id: Name


class FinishReason(LenientBody):
    type: Name = "success"


class FinishSessionRequest(LenientBody):
    reason: FinishReason | None = None
    detail: str | None = None


class TelemetryRequest(LenientBody):
    events: list[object] = Field(default_factory=list)


# ---- models


class LoraConfig(Body):
    rank: int = Field(default=32, ge=1, le=2**15)
    seed: Int64 | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def to_spec(self, draw_seed: Callable[[], int]) -> LoraSpec:
        """Args: draw_seed: gives a seed where the request has none."""
        return LoraSpec(
            rank=self.rank,
            seed=_normalize_seed(self.seed, draw_seed),
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class OptimizerConfig(Body):
    """Optimizer of a new model; only Adam is supported."""

    type: str = "adamw"

    @field_validator("type")
    @classmethod
    def _adam(cls, value: str) -> str:
        if value != "adamw":
            raise ValueError(f"must be 'adamw', the only optimizer of this server; got {value[:80]!r}")
        return value


class CreateModelRequest(Body):
    session_id: Name
    model_seq_id: Index
    base_model: Name
    user_metadata: dict[str, object] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    type: Literal["create_model"] = "create_model"

    _validate_storable = field_validator("user_metadata")(_validate_storable)

    @field_validator("lora_config")
    @classmethod
    def _is_lora(cls, value: LoraConfig | None) -> LoraConfig:
        if value is None:  # only if the request says so: a field that is left out has its default
            raise ValueError(
                "must be an adapter configuration: full fine-tuning is not supported, because all models share one "
                "frozen base model; set a rank, or train all weights with `tx train` or skyrl_train"
            )
        return value


class GetInfoRequest(Body):
    model_id: Name
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(Body):
    model_id: Name
    type: Literal["unload_model"] = "unload_model"


# ---- training; forward and forward_backward are read by `training_requests`


class Adam(Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)

    def to_params(self) -> AdamParams:
        return AdamParams(**{name: float(getattr(self, name)) for name in type(self).model_fields})


class OptimStepRequest(Body):
    model_id: Name
    seq_id: Seq
    adam_params: Adam = Field(default_factory=Adam)
    optimizer_params: dict[str, object] | None = None
    type: Literal["optim_step"] = "optim_step"

    @field_validator("optimizer_params")
    @classmethod
    def _adam(cls, value: dict[str, object] | None) -> None:
        if value is not None:
            raise ValueError(
                f"this server supports only AdamW, configured by adam_params; got {str(value.get('type'))[:80]!r}"
            )


class SaveWeightsRequest(Body):
    model_id: Name
    seq_id: Seq
    path: Name | None = None
    """The checkpoint's name, not a tinker:// path."""
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"

    _validate_storable = field_validator("user_metadata")(_validate_storable)


class SaveWeightsForSamplerRequest(Body):
    model_id: Name
    seq_id: Seq
    path: Name | None = None
    sampling_session_seq_id: Index | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Both are weights that never change: `inflight` merely allows a server to be less exact."""
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    _validate_storable = field_validator("user_metadata")(_validate_storable)

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        if self.path is None and self.sampling_session_seq_id is None:
            raise ValueError("requires a path (the checkpoint's name) or a sampling_session_seq_id")
        return self


class SaveWeightsExternalRequest(Body):
    model_id: Name
    seq_id: Seq
    path: Name
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[Name] | None = Field(default=None, max_length=10)
    """Public keys that every file is encrypted to: `age1…`, or an SSH key."""
    type: Literal["save_weights_external"] = "save_weights_external"

    _validate_storable = field_validator("user_metadata")(_validate_storable)


class LoadWeightsRequest(Body):
    """Load in place (`model_id`, `seq_id`), or as the first request of a new model (`session_id`, `model_seq_id`)."""

    path: Name
    optimizer: bool = False
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Index | None = None
    base_model: Name | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"

    _validate_storable = field_validator("user_metadata")(_validate_storable)

    @property
    def creates_model(self) -> bool:
        return self.session_id is not None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        in_place = (self.model_id is not None, self.seq_id is not None)
        creating = (self.session_id is not None, self.model_seq_id is not None)
        if {in_place, creating} != {(True, True), (False, False)}:
            raise ValueError(
                "requires model_id and seq_id to load in place, or session_id and model_seq_id to load into a new model"
            )
        if in_place[0]:
            for name in ("base_model", "user_metadata"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is only allowed for a new model (session_id and model_seq_id)")
        return self

    @field_validator("weights_access_token")
    @classmethod
    def _no_token(cls, value: str | None) -> None:
        if value:
            raise ValueError("this server has no access tokens; the owner of the checkpoint can publish it")


class WeightsInfoRequest(Body):
    tinker_path: Name


class SetTtlRequest(Body):
    ttl_seconds: TtlSeconds | None = None
    """None: for ever."""


# ---- sampling


class CreateSamplingSessionRequest(Body):
    session_id: Name
    sampling_session_seq_id: Index
    base_model: Name | None = None
    model_path: Name | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("requires base_model or model_path")
        return self


class Chunk(Body):
    """A piece of a prompt. Clients up to 0.16 leave the type out."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, dict) and (value.get("type", "encoded_text") != "encoded_text" or "tokens" not in value):
            kind = str(value.get("type", "something else"))[:80]
            raise ValueError(f"must be encoded_text: the models of this server are text-only; got {kind}")
        return value


class ModelInput(Body):
    chunks: list[Chunk]


_STOPS = [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 1024}]
_STOPS += [{"type": "array", "maxItems": 64, "items": kind} for kind in ({"type": "integer"}, _STOPS[1])]


class SamplingParams(Body):
    max_tokens: Index | None = None
    seed: Int64 | None = None
    stop: Annotated[Any, WithJsonSchema({"anyOf": _STOPS})] = None
    """None: the end of the sequence, as the tokenizer has it; []: nothing; a text, texts, or token ids."""
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0

    @field_validator("stop")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        stops = value if isinstance(value, list) else [] if value is None else [value]
        texts = all(isinstance(stop, str) for stop in stops)
        ids = isinstance(value, list) and all(type(stop) is int for stop in stops)
        if not texts and not ids:
            raise ValueError(f"must be a string, a list of strings or a list of token ids; got {str(value)[:80]}")
        if texts and any(len(stop) > 1024 for stop in stops):
            raise ValueError("must be strings of at most 1024 characters")
        return value

    def to_params(self, draw_seed: Callable[[], int]) -> SampleParams:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SampleParams(
            seed=_normalize_seed(self.seed, draw_seed),
            max_tokens=self.max_tokens,
            temperature=float(self.temperature),
            top_k=self.top_k,
            top_p=float(self.top_p),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            stop_at_eos=self.stop is None,
        )


_NOT_HERE = {
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "prompt_logprobs_last_n": None,
}
"""Options of an `asample` that this server has not, each with the value that asks for nothing."""


class TargetTokens(Body):
    """Token ids to score, a tensor [len(prompt) - 1, K]: row i is scored at the position of prompt token i + 1; -1 for
    none.
    """

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def to_targets(self) -> PromptTargets:
        """Raises: RequestError if data, shape and indices do not belong together."""
        name, fields = "target_prompt_logprobs", dict(self)
        if len(self.shape) != 2:
            raise RequestError(f"{name}.shape must be [len(prompt) - 1, K]; got {self.shape[:8]}")
        TensorReader().read_json(JsonTensor(**{field: fields[field] for field in JsonTensor.__struct_fields__}), name)
        return PromptTargets(
            shape=(self.shape[0], self.shape[1]),
            ids=self.data,
            crow=self.sparse_crow_indices,
            columns=self.sparse_col_indices,
        )


class AsampleRequest(Body):
    """Sample from a sampling session (`sampling_session_id`, `seq_id`), a checkpoint (`model_path`) or the base
    model."""

    prompt: ModelInput
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    num_samples: Index = 1
    sampling_session_id: Name | None = None
    seq_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Sequence number within the sampling session, or of none; copies of a client count from multiples of 1e9."""
    base_model: Name | None = None
    model_path: Name | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Index = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    """Belongs to the loss `stable_reinforce`: refused, or ignored where another loss is computed for it."""
    type: Literal["sample"] = "sample"

    @field_validator(*_NOT_HERE)
    @classmethod
    def _not_here(cls, value: object) -> object:
        if value:
            raise ValueError("is not supported by this server; remove it")
        return value

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.sampling_session_id is not None and self.seq_id is None:
            raise ValueError("seq_id requires sampling_session_id; it identifies repeated requests")
        if self.sampling_session_id is None and self.base_model is None and self.model_path is None:
            raise ValueError("requires sampling_session_id and seq_id, model_path or base_model")
        return self

    @property
    def num_tokens(self) -> int:
        """Number of token ids of the prompt and of the targets."""
        targets = self.target_prompt_logprobs
        return sum(len(chunk.tokens) for chunk in self.prompt.chunks) + (len(targets.data) if targets else 0)

    def to_spec(self, draw_seed: Callable[[], int]) -> SampleSpec:
        """Args: draw_seed: gives a seed where the request has none."""
        return SampleSpec(
            prompt=[token for chunk in self.prompt.chunks for token in chunk.tokens],
            num_samples=self.num_samples,
            params=self.sampling_params.to_params(draw_seed),
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            targets=None if self.target_prompt_logprobs is None else self.target_prompt_logprobs.to_targets(),
        )


# ---- futures


class RetrieveFutureRequest(Body):
    request_id: Name
    allow_metadata_only: bool = False


# ---- errors


class HasErrors(Protocol):
    """pydantic's ValidationError, FastAPI's RequestValidationError."""

    def errors(self) -> Any: ...


def describe_errors(error: HasErrors) -> str:
    """Describe validation errors, one per line: `field: rule; got value`."""
    lines = []
    for e in error.errors()[:5]:
        place = [part for part in e["loc"] if part != "body"]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
        rule = e["msg"].removeprefix("Value error, ")
        value = e.get("input")
        shown = isinstance(value, str | int | float | bool) and "; got " not in rule
        lines.append(f"{field or 'body'}: {rule}" + (f"; got {value!r:.80}" if shown else ""))
    return "\n".join(dict.fromkeys(lines)).encode(errors="backslashreplace").decode()


def to_request_error(error: HasErrors) -> RequestError:
    """Convert validation errors to a RequestError with status 422."""
    return RequestError(describe_errors(error), 422)


def _normalize_seed(given: int | None, draw_seed: Callable[[], int]) -> int:
    """Make a seed non-negative, as random generators require."""
    return (draw_seed() if given is None else given) % 2**63
