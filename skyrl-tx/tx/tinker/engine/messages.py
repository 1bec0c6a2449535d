"""What the API process and the engine process say to each other. Plain values; arrays travel as the protobuf bytes of
the wire (`wire.codec`), which are read where they are needed and nowhere else.

Orders of one model arrive in the order of its seq numbers, without gaps. The engine's memory is never the truth: the
database is, and a snapshot with the orders that came after it gives the model back.
"""

import msgspec

from tx.tinker.backends.base import BackendInfo
from tx.tinker.types import AdamParams, LoraSpec, SampleSpec


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    tenant: str


class ModelOrder(Order, frozen=True, kw_only=True):
    model_id: str
    seq: int
    replay: bool = False
    """The result is already known and recorded: do it for its effect, report nothing. Orders that failed are left out,
    but for a failed `Optimize`, which cleared the gradient and does so again."""


class CreateModel(ModelOrder, frozen=True, kw_only=True):
    lora: LoraSpec
    folder: str | None = None
    """A checkpoint's to begin from, or None for a fresh adapter."""
    optimizer: bool = False
    """With the checkpoint's optimizer."""


class Train(ModelOrder, frozen=True, kw_only=True):
    payload: bytes
    """`ForwardBackwardRequest` of the wire, checked."""


class Optimize(ModelOrder, frozen=True, kw_only=True):
    adam: AdamParams


class Save(ModelOrder, frozen=True, kw_only=True):
    folder: str
    """Where it shall stand, whole or not at all. Local, or an fsspec URL."""
    state: bool
    """With the optimizer (a training checkpoint), or the adapter alone."""


class Load(ModelOrder, frozen=True, kw_only=True):
    folder: str
    optimizer: bool


class Unload(ModelOrder, frozen=True, kw_only=True):
    pass


class Sample(Order, frozen=True, kw_only=True):
    spec: SampleSpec
    adapter: str | None
    """Its folder; None: the base model."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A model that lived before the engine did: from its snapshot, or from its creation if it has none. Orders of after
    it follow, first with `replay`."""

    model_id: str
    tenant: str
    lora: LoraSpec
    snapshot: str | None
    seq: int
    """The last seq that the snapshot contains; -1 with none."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for these samples any more; of those not yet done nothing is reported. Training goes on, since later
    orders build on it."""

    request_ids: list[str]


# ---- from the engine


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    info: BackendInfo


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    result: bytes
    """`ForwardBackwardOutput` or `SampleResponse` of the wire; JSON for the others."""
    size_bytes: int = 0
    """Of what a `Save` wrote."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    error: str
    category: str
    """`user`, `server`"""


class Snapshotted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model as of after `seq` stands whole in `folder`; its earlier snapshot may go once this is recorded. Sent
    after the results of all orders up to `seq`, and to be recorded after them. The engine removes no snapshot that it
    told of, and may read the last one again."""

    model_id: str
    seq: int
    folder: str


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every second: the engine is alive, and what it does."""

    queued_orders: int
    running_samples: int
    resident_models: int
    train_tokens: dict[str, int]
    """By tenant, since the start."""
    sample_tokens: dict[str, int]
    busy_seconds: float
    """Of the training thread, since the start."""
    turn_seconds: float = 0.0
    """For so long the training thread has been at its present turn: one pass and some quick orders. 0: it waits."""
    step_seconds: float = 0.0
    """The same of sampling's present step."""


FromApi = CreateModel | Train | Optimize | Save | Load | Unload | Sample | Restore | Cancel
FromEngine = Ready | Done | Failed | Snapshotted | Pulse
