"""Data types of the server: parsed and checked requests with all defaults filled in. Independent of HTTP, database and
torch. Shapes: N input tokens of a datum, K target tokens a position.
"""

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from tx.errors import RequestError
from tx.tinker.chunked_lists import to_array

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
SERVER, ENGINE = "server", "engine"
"""Roles of the two processes: in records of waits, and the name of the server's own run folder."""

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
"""`weights`: an adapter with its optimizer, to train on. `sampler_weights`: an adapter to sample from.
`external_weights`: an adapter to download, perhaps encrypted; the server itself does not load it."""


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a model. Alpha is always 32: W x + (32 / rank) B A x."""

    rank: int = 32
    seed: int = 0
    """Random seed of A; B starts at zero, so a new adapter changes nothing."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    share_experts: bool = False
    """Experts of a layer have one A of their gate and one of their up projections, and one B of their down
    projections."""


LORA_ALPHA = 32


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    """One step of AdamW on one model's adapter. Defaults are the protocol's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the adapter's gradient; 0 is off."""


class SampleParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters."""

    seed: int
    """Sample i draws from (seed, i). Drawn by the server where the request has none, so that doing it again after a
    crash gives the same."""
    max_tokens: int | None = None
    """None: until the context is full."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_at_eos: bool = True
    """Only when the request says nothing of stops."""


TARGETS_REFUSED = (
    "target_prompt_logprobs is not computed by the backend of this server: request topk_prompt_logprobs, or serve "
    "with --backend torch"
)


class PromptTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to score at each position of a prompt of N tokens, in the wire layout: a table [N - 1, K], dense or
    sparse (CSR).
    """

    shape: tuple[int, int]
    ids: list[int]
    """-1 asks for nothing."""
    crow: list[int] | None = None
    columns: list[int] | None = None

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return index in `ids`, row and id of the requested cells; [C] each."""
        ids = to_array(self.ids).astype(np.int64, copy=False)
        rows = np.repeat(np.arange(self.shape[0]), self.shape[1] if self.crow is None else np.diff(self.crow))
        asked = np.flatnonzero(ids >= 0)
        return asked, rows[asked], ids[asked]


class TargetLogProbs(NamedTuple):
    """Log-probs of `PromptTargets`, in the same layout."""

    shape: tuple[int, int]
    values: list[float]
    """0 where nothing was asked for."""
    crow: list[int] | None = None
    columns: list[int] | None = None


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One `asample`."""

    prompt: list[int]
    num_samples: int = 1
    params: SampleParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    targets: PromptTargets | None = None


@dataclass(frozen=True)
class Datum:
    """One sequence to train on; the caller has shifted the targets."""

    tokens: np.ndarray
    """[N] int64"""
    inputs: dict[str, np.ndarray]
    """Inputs of the loss by name: `target_tokens` int64 [N] or [N, K]; `weights`, `logprobs`, `advantages`, … float32
    of the shape of the targets."""


@dataclass(frozen=True)
class TrainingPass:
    """A forward or forward-backward request, or a part of one (the data of one micro-batch)."""

    model_id: str
    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class PassOutput:
    """Result of a pass."""

    logprobs: list[np.ndarray]
    """A datum: float32 [N] or [N, K], log p(target) under the weights before the step."""
    metrics: dict[str, float]
    """Keys of the form `name:how`; at least `loss:sum`. Merged over micro-batches by `how` (sum, mean weighted by
    datums, min, max)."""


class Sequence(NamedTuple):
    """One sampled sequence."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SampleOutput:
    """Result of a sample request."""

    sequences: list[Sequence]
    prompt_logprobs: list[float | None] | None = None
    """len(prompt); None first"""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """len(prompt); None first; else the top-k (token, log-prob) in descending order"""
    target_prompt_logprobs: TargetLogProbs | None = None


def format_request_id(owner_id: str, seq: int | str) -> str:
    """Return the id of a request of a model or sampler: the same for each repetition of the request."""
    return f"{owner_id}:{seq}"


def format_model_id(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def format_sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def validate_checkpoint_name(name: str, setting: str = "path") -> str:
    """Return the name if it is safe as a folder name.

    Raises:
        RequestError: it is not.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise RequestError(
            f"{setting} must be a name of 1 to 255 letters, digits, '-', '_' and '.', not beginning with '.' or '-' "
            f"and without '..'; got {name[:80]!r}"
        )
    return name


class TinkerPath(NamedTuple):
    """`tinker://RUN/KIND/NAME`, KIND is a `CheckpointKind`; RUN is a model's id, which may contain ':'."""

    run_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str, setting: str = "path") -> "TinkerPath":
        """Parse a path.

        Raises:
            RequestError: the path is invalid.
        """
        match text.split("/"):
            case ["tinker:", "", run_id, ("weights" | "sampler_weights" | "external_weights") as kind, name]:
                if re.fullmatch(r"[\w:.-]+", run_id):
                    return cls(run_id, kind, validate_checkpoint_name(name, setting))
        kinds = "|".join(get_args(CheckpointKind))
        raise RequestError(f"{setting} must be tinker://RUN/{kinds}/NAME; got {text[:200]!r}")
