"""Commands of the engine, each in one class from a client's request to its rows in the database.

- `encode` (API process) checks a decoded request and returns the command with its stored form.
- `execute` (engine process, training thread) applies the command to a model.
- `record` (API process) writes the consequences of its success, in the transaction that completes the request.

Class and field names are part of the stored format: databases of earlier releases hold commands as msgpack.
Commands of one model reach the engine in the order of their seq numbers, without gaps.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import orjson

from tx.errors import ModelError, RequestError
from tx.tinker.backends.base import TrainingBackend
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.storage.checkpoint_places import get_folder_parts
from tx.tinker.storage.encryption import encrypt_folder, parse_recipients
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import DamagedFilesError
from tx.tinker.types import (
    AdamParams,
    CheckpointKind,
    LoraSpec,
    SampleSpec,
    TinkerPath,
    format_request_id,
    format_sampler_id,
    validate_checkpoint_name,
)
from tx.tinker.wire import schemas
from tx.tinker.wire.checks import check_training
from tx.tinker.wire.codec import TrainingRequest

if TYPE_CHECKING:  # at run time in `record` alone: an engine process has no use for half a second of imports
    from sqlmodel import Session as Database

    from tx.tinker.storage.db_models import SamplerRow

logger = logging.getLogger(__name__)

INLINE_BYTES = 32 << 10
"""Larger payloads and results are stored as blobs."""
THREAD_FROM_BYTES = 256 << 10
"""Larger training requests are checked in a thread, so that the event loop stays responsive."""
THREAD_FROM_TOKENS = 1 << 14
"""Sample requests with more token ids are checked in a thread; fewer take about a millisecond."""
REPLAYED_KINDS = ("create", "train", "optimize", "load")
"""Kinds that are replayed to restore a model, until a snapshot contains them."""

Job = Callable[[], Any]
"""Work that may wait for disks or networks; it runs outside the training thread."""
Steps = Generator[Job, Any, Any]
"""Work of the training thread with pauses: each yielded job runs elsewhere, and its result is sent back."""


class CommandAddress(NamedTuple):
    """Identity of a command: fields of `ModelCommand`."""

    request_id: str
    tenant: str
    model_id: str
    seq: int


class ModelState(Protocol):
    """Properties of a live model that `encode` reads."""

    model_id: str
    session_id: str
    lora: LoraSpec


@dataclass(frozen=True)
class CheckpointSource:
    """Existing weights."""

    path: str
    model_id: str
    base_model: str
    lora: LoraSpec
    folder: str


class CheckpointLookup(Protocol):
    """Checkpoints and sampler numbers that exist or are reserved."""

    async def source(
        self,
        tenant: str,
        path: str,
        *,
        optimizer: bool = False,
        setting: str = "path",
        pending_model_id: str | None = None,
    ) -> CheckpointSource:
        """Find a checkpoint that the tenant may read. Raises: RequestError."""
        ...

    async def reserve_space(self, tenant: str, request_id: str, kind: CheckpointKind, rank: int) -> None:
        """Check that the tenant may save more, and count this save from now on. Raises: RequestError, Busy."""
        ...

    async def check_name_is_free(self, path: TinkerPath) -> None:
        """Check that no checkpoint has this path. Raises: RequestError."""
        ...

    async def free_sampler_id(self, session_id: str, number: int) -> str:
        """Return the sampler's id. Raises: RequestError if it is taken."""
        ...


@dataclass(frozen=True)
class EncodeContext:
    """Dependencies of `encode`."""

    facts: BaseModelFacts
    folders: Folders
    checkpoints: CheckpointLookup


@dataclass(frozen=True)
class ExecutionContext:
    """Dependencies of `execute`.

    Attributes:
        forget: unloads a model for good
    """

    training: TrainingBackend
    folders: Folders
    forget: Callable[[str], None]

    def load(self, model_id: str, folder: str, *, optimizer: bool) -> Steps:
        """Fetch a checkpoint and load it into a model.

        Raises:
            ModelError: the checkpoint was deleted, is damaged or does not fit.
        """
        try:
            local = yield partial(self.folders.verified, folder)
        except FileNotFoundError:
            raise ModelError("the checkpoint no longer exists") from None
        except DamagedFilesError as error:
            logger.error("checkpoint %s: %s", folder, error)
            raise ModelError(f"the checkpoint is damaged on the server's disk: {error}. Load another one") from None
        self.training.load(model_id, local, optimizer=optimizer)


class ExecutionResult(NamedTuple):
    """Result of `execute`."""

    metrics: dict[str, float] | None = None
    size_bytes: int = 0
    """Bytes written to storage."""


@dataclass
class PostCommit:
    """Work on memory and disk that follows the commit of `record`."""

    sampler: "SamplerRow | None" = None
    blobs: list[str] = field(default_factory=list)
    """Blobs to delete."""
    snapshot: str | None = None
    """Snapshot folder to delete."""


class SaveEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a successful `Save`: a named checkpoint, a sampler, or both."""

    kind: CheckpointKind
    name: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, object] | None = None
    sampling_session_seq_id: int | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to the engine."""

    request_id: str
    tenant: str

    @property
    def used_folder(self) -> str | None:
        """Checkpoint folder that the command reads or writes."""
        return None


class ModelCommand(Command, frozen=True, kw_only=True):
    """A command of one model."""

    model_id: str
    seq: int
    replay: bool = False
    """The result is recorded already: apply the effect and report nothing. Failed commands are not replayed, except a
    failed `Optimize`, which cleared the gradient."""

    @property
    def source_folder(self) -> str | None:
        """Checkpoint folder that the model's state is loaded from. Such a command is followed by a snapshot, because
        the checkpoint may be deleted before a replay.
        """
        return None

    @property
    def used_folder(self) -> str | None:
        return self.source_folder

    @property
    def changes_model(self) -> bool:
        return self.source_folder is not None

    def execute(self, context: ExecutionContext) -> Steps:
        """Apply the command to a model in memory. Returns: `ExecutionResult`."""
        raise NotImplementedError(type(self).__name__)

    def record(self, database: "Database", effect: SaveEffect | None, size_bytes: int) -> PostCommit:
        """Write the consequences of success to the database."""
        return PostCommit()


class StoredCommand(msgspec.Struct, frozen=True, kw_only=True, rename={"command": "order"}):
    """The command column of a request's row."""

    command: "CreateModel | Train | Optimize | Save | Load | Unload | Sample"
    """Command without its payload, if that is a blob."""
    answer: bytes | None = None
    """Result as JSON, where it does not depend on the engine."""
    save: SaveEffect | None = None

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> "StoredCommand":
        return _decoder.decode(data)


@dataclass(frozen=True)
class EncodedCommand:
    """A checked request, ready to be stored."""

    kind: str
    stored: StoredCommand
    payload: bytes | None = None
    """Payload of a large `Train`, stored as a blob."""


class CreateModel(ModelCommand, frozen=True, kw_only=True):
    """Create an adapter, new or from a checkpoint."""

    lora: LoraSpec
    folder: str | None = None
    """Checkpoint to start from; None: a new adapter."""
    optimizer: bool = False
    """Load the checkpoint's optimizer too."""

    @property
    def source_folder(self) -> str | None:
        return self.folder

    @classmethod
    def encode(
        cls,
        request: schemas.CreateModelRequest | schemas.LoadWeightsRequest,
        tenant: str,
        model_id: str,
        lora: LoraSpec,
        folder: str | None,
    ) -> StoredCommand:
        answer = {"model_id": model_id, "type": request.type}
        optimizer = False
        if isinstance(request, schemas.LoadWeightsRequest):
            answer, optimizer = {"path": request.path} | answer, request.optimizer
        address = CommandAddress(format_request_id(model_id, 0), tenant, model_id, 0)
        command = cls(**address._asdict(), lora=lora, folder=folder, optimizer=optimizer)
        return StoredCommand(command=command, answer=orjson.dumps(answer))

    def execute(self, context: ExecutionContext) -> Steps:
        if self.folder is not None:
            yield from context.load(self.model_id, self.folder, optimizer=self.optimizer)
        return ExecutionResult()


class Train(ModelCommand, frozen=True, kw_only=True):
    """A forward or forward-backward pass. The engine executes it jointly with passes of other models
    (`RunningPass`).
    """

    payload: bytes
    """A checked `ForwardBackwardRequest` of the wire."""

    @classmethod
    async def encode(
        cls, request: TrainingRequest, address: CommandAddress, model: ModelState, context: EncodeContext
    ) -> EncodedCommand:
        payload = request.payload
        if len(payload) < THREAD_FROM_BYTES:
            check_training(request, context.facts)
        else:
            await asyncio.to_thread(check_training, request, context.facts)
        inline = len(payload) <= INLINE_BYTES
        command = cls(**address._asdict(), payload=payload if inline else b"")
        kind = "forward" if request.forward_only else "train"
        return EncodedCommand(kind, StoredCommand(command=command), None if inline else payload)


class Optimize(ModelCommand, frozen=True, kw_only=True):
    """Apply one AdamW step with the accumulated gradient."""

    adam: AdamParams

    @property
    def changes_model(self) -> bool:
        return True

    @classmethod
    async def encode(
        cls, request: schemas.OptimStepRequest, address: CommandAddress, model: ModelState, context: EncodeContext
    ) -> EncodedCommand:
        command = cls(**address._asdict(), adam=request.adam_params.to_params())
        return EncodedCommand("optimize", StoredCommand(command=command))

    def execute(self, context: ExecutionContext) -> Steps:
        return ExecutionResult(metrics=context.training.optim_step(self.model_id, self.adam))
        yield  # a generator, as `execute` of every command


class Save(ModelCommand, frozen=True, kw_only=True):
    """Save a checkpoint, a sampler's weights, both, or weights to download."""

    folder: str
    """Destination, written atomically: a local folder or an fsspec URL."""
    state: bool
    """Save the optimizer too (a training checkpoint)."""
    recipients: tuple[str, ...] = ()
    """Public keys (https://age-encryption.org) that the files are encrypted to."""

    @property
    def used_folder(self) -> str | None:
        return self.folder

    @classmethod
    async def encode(
        cls,
        request: schemas.SaveWeightsRequest | schemas.SaveWeightsForSamplerRequest | schemas.SaveWeightsExternalRequest,
        address: CommandAddress,
        model: ModelState,
        context: EncodeContext,
    ) -> EncodedCommand:
        """Choose a folder for this request alone, so that a replay after a crash overwrites nothing else."""
        name = validate_checkpoint_name(request.path) if request.path is not None else None
        number, overwrite, recipients = None, False, ()
        kind: CheckpointKind = "sampler_weights"
        if isinstance(request, schemas.SaveWeightsRequest):
            name, overwrite, kind = name or f"step-{request.seq_id}", request.overwrite, "weights"
        elif isinstance(request, schemas.SaveWeightsExternalRequest):
            kind, recipients = "external_weights", tuple(request.age_encryption_recipients or ())
            parse_recipients(recipients)
        else:
            number = request.sampling_session_seq_id
        effect = SaveEffect(
            kind=kind,
            name=name,
            overwrite=overwrite,
            ttl_seconds=request.ttl_seconds,
            user_metadata=None if request.user_metadata is None else dict(request.user_metadata),
            sampling_session_seq_id=number,
        )
        answer = {"type": request.type}
        if number is not None:
            answer["sampling_session_id"] = await context.checkpoints.free_sampler_id(model.session_id, number)
        if name is None:
            folder = context.folders.place(model.model_id, "samplers", f"{number}@{address.seq}")
        else:
            path = TinkerPath(model.model_id, kind, name)
            if not effect.overwrite:
                await context.checkpoints.check_name_is_free(path)
            # Last: a request that is refused after it would keep its room.
            await context.checkpoints.reserve_space(address.tenant, address.request_id, kind, model.lora.rank)
            folder = context.folders.place(*get_folder_parts(path, address.seq))
            answer["path"] = str(path)
        command = cls(**address._asdict(), folder=folder, state=kind == "weights", recipients=recipients)
        return EncodedCommand("save", StoredCommand(command=command, answer=orjson.dumps(answer), save=effect))

    def execute(self, context: ExecutionContext) -> Steps:
        if self.replay:
            return ExecutionResult()
        with ExitStack() as stack:
            local = stack.enter_context(context.folders.writing(self.folder))
            context.training.save(self.model_id, local, state=self.state)
            if self.recipients:
                yield partial(encrypt_folder, local, self.recipients)
            publish = stack.pop_all()
        yield publish.close
        return ExecutionResult(size_bytes=(yield partial(context.folders.size, self.folder)))

    def record(self, database: "Database", effect: SaveEffect | None, size_bytes: int) -> PostCommit:
        """Insert or replace the checkpoint, and insert the sampler unless its session has ended."""
        from tx.tinker.storage.db_models import CheckpointRow, ModelRow, SamplerRow, SessionRow
        from tx.tinker.storage.garbage import schedule_deletion

        assert effect is not None
        model, now, path = database.get_one(ModelRow, self.model_id), time.time(), None
        if effect.name is not None:
            path = str(TinkerPath(self.model_id, effect.kind, effect.name))
            row = database.get(CheckpointRow, (self.model_id, effect.kind, effect.name)) or CheckpointRow(
                model_id=self.model_id,
                kind=effect.kind,
                name=effect.name,
                tenant=self.tenant,
                folder=self.folder,
                created_at=now,
            )
            replaced = row.folder
            row.folder, row.created_at, row.size_bytes = self.folder, now, size_bytes
            row.expires_at = None if effect.ttl_seconds is None else now + effect.ttl_seconds
            row.user_metadata = effect.user_metadata
            database.add(row)
            database.flush()
            if replaced != self.folder:
                schedule_deletion(database, [replaced], now)
        if effect.sampling_session_seq_id is None:
            return PostCommit()
        session = database.get(SessionRow, model.session_id)
        sampler_id = format_sampler_id(model.session_id, effect.sampling_session_seq_id)
        if session is None or session.ended_at is not None or database.get(SamplerRow, sampler_id) is not None:
            schedule_deletion(database, [self.folder], now)
            return PostCommit()
        sampler = SamplerRow(
            sampler_id=sampler_id,
            tenant=self.tenant,
            session_id=model.session_id,
            sampling_session_seq_id=effect.sampling_session_seq_id,
            base_model=model.base_model,
            model_path=path,
            model_id=self.model_id,
            folder=self.folder,
            ephemeral=path is None,
            created_at=now,
        )
        database.add(sampler)
        return PostCommit(sampler=sampler)


class Load(ModelCommand, frozen=True, kw_only=True):
    """Load a checkpoint into a model."""

    folder: str
    optimizer: bool

    @property
    def source_folder(self) -> str | None:
        return self.folder

    @classmethod
    async def encode(
        cls, request: schemas.LoadWeightsRequest, address: CommandAddress, model: ModelState, context: EncodeContext
    ) -> EncodedCommand:
        source = await context.checkpoints.source(
            address.tenant, request.path, optimizer=request.optimizer, pending_model_id=model.model_id
        )
        if source.lora.rank != model.lora.rank:
            raise RequestError(
                f"path: the checkpoint's rank must be {model.lora.rank}, that of model {model.model_id}; "
                f"got {source.lora.rank}"
            )
        command = cls(**address._asdict(), folder=source.folder, optimizer=request.optimizer)
        answer = {"path": request.path, "model_id": model.model_id, "type": request.type}
        return EncodedCommand("load", StoredCommand(command=command, answer=orjson.dumps(answer)))

    def execute(self, context: ExecutionContext) -> Steps:
        yield from context.load(self.model_id, self.folder, optimizer=self.optimizer)
        return ExecutionResult()


class Unload(ModelCommand, frozen=True, kw_only=True):
    """Unload a model for good, after all its other commands."""

    @classmethod
    def encode(cls, tenant: str, model_id: str, seq: int) -> StoredCommand:
        """Args: seq: the model's next sequence number; unused."""
        command = cls(request_id=format_request_id(model_id, "unload"), tenant=tenant, model_id=model_id, seq=seq)
        return StoredCommand(command=command, answer=orjson.dumps({"model_id": model_id, "type": "unload_model"}))

    def execute(self, context: ExecutionContext) -> Steps:
        context.forget(self.model_id)
        return ExecutionResult()
        yield  # a generator, as `execute` of every command

    def record(self, database: "Database", effect: SaveEffect | None, size_bytes: int) -> PostCommit:
        """Mark the model unloaded and forget the commands kept for replay."""
        from tx.tinker.storage.db_models import ModelRow
        from tx.tinker.storage.rows import remove_commands, update_model

        snapshot = database.get_one(ModelRow, self.model_id).snapshot
        update_model(database, self.model_id, status="unloaded", snapshot=None, next_seq=self.seq)
        return PostCommit(snapshot=snapshot, blobs=remove_commands(database, self.model_id))


class Sample(Command, frozen=True, kw_only=True):
    """Sample from an adapter or the base model."""

    spec: SampleSpec
    adapter: str | None
    """Folder of the adapter; None: the base model."""

    @property
    def used_folder(self) -> str | None:
        return self.adapter

    @classmethod
    def encode(cls, request_id: str, tenant: str, spec: SampleSpec, adapter: str | None) -> StoredCommand:
        return StoredCommand(command=cls(request_id=request_id, tenant=tenant, spec=spec, adapter=adapter))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredCommand)
