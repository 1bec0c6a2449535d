"""What lives now, in memory: a copy of rows, with what rows need not know. All lookups check whose a thing is."""

import asyncio
import time
from dataclasses import dataclass, field

from tx.errors import RequestError
from tx.tinker.desk.records import Record
from tx.tinker.desk.results import StoredResult
from tx.tinker.desk.sequencer import Sequencer
from tx.tinker.engine.messages import Sample, Save
from tx.tinker.types import CheckpointKind, LoraSpec


def request_id_of(owner_id: str, seq: int | str) -> str:
    """The same request has the same id, whoever asks how often."""
    return f"{owner_id}:{seq}"


def model_id_of(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


@dataclass(eq=False)
class Session:
    session_id: str
    tenant: str
    last_heartbeat: float = field(default_factory=time.monotonic)
    """Of this process's clock: after a restart everybody gets the whole time again."""
    unsaved_heartbeat: float | None = None
    """When the last heartbeat came, if no row says so yet."""
    ending: asyncio.Future[None] | None = None

    def touch(self) -> None:
        """A heartbeat, or anything else that its user asked for."""
        self.last_heartbeat, self.unsaved_heartbeat = time.monotonic(), time.time()


@dataclass(eq=False)
class Entry:
    """A request that is durable and not done."""

    request_id: str
    tenant: str
    kind: str
    record: Record
    payload_blob: str | None = None
    payload: bytes | None = None
    """Kept only from acceptance to the first sending; later it is read from the blob."""
    run: "Run | None" = None
    seq: int | None = None
    sampler_id: str | None = None
    tokens: int = 0
    """What a sample may cost: prompt and answers."""
    accepted_at: float = field(default_factory=time.monotonic)
    finished: asyncio.Future[StoredResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent_to: int = 0
    """The engine's life that it was sent to."""
    settling: bool = False
    """The outcome is known and being recorded."""


@dataclass(eq=False)
class Run:
    """A model that can be trained."""

    model_id: str
    tenant: str
    session_id: str
    base_model: str
    lora: LoraSpec
    sequence: Sequencer[Entry] = field(default_factory=Sequencer[Entry])
    queue: dict[str, Entry] = field(default_factory=dict)
    """Due and not done, in order, by request id."""
    deciding: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Seqs whose acceptance is being recorded."""
    refused: dict[int, RequestError] = field(default_factory=dict)
    saving: dict[tuple[CheckpointKind, str], str] = field(default_factory=dict)
    """Folders of named checkpoints that are ordered and not there yet."""
    needed_folders: dict[int, str] = field(default_factory=dict)
    """Folders of checkpoints that the seqs after the last snapshot began from; a new engine would read them again."""
    snapshot: str | None = None
    snapshot_seq: int = -1
    unsaved_request_at: float | None = None
    unloading: asyncio.Future[None] | None = None
    """Done when its end is written down."""
    touched_in: int = 0
    """The last life of the engine that was told anything of this model."""
    resident_in: int = 0
    """The last life that was told all of it."""
    pumping: bool = False

    @property
    def head(self) -> Entry | None:
        """What the engine does for this model, or will do next."""
        return next((entry for entry in self.queue.values() if not entry.settling), None)


@dataclass(eq=False)
class Sampler:
    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None
    folder: str | None
    accepting: dict[int, asyncio.Task[None]] = field(default_factory=dict)


@dataclass
class Live:
    sessions: dict[str, Session] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    pending: dict[str, Entry] = field(default_factory=dict)
    """All entries, by request id."""
    promised_samplers: set[str] = field(default_factory=set)
    """Ids of samplers that saves under way will become."""

    def promise(self, entry: "Entry") -> None:
        """Takes the names that a `Save` will need, so that no other gets them meanwhile."""
        order, save, run = entry.record.order, entry.record.save, entry.run
        if save is None or run is None or not isinstance(order, Save):
            return
        if save.name is not None:
            run.saving[save.kind, save.name] = order.folder
        if save.sampling_session_seq_id is not None:
            self.promised_samplers.add(sampler_id_of(run.session_id, save.sampling_session_seq_id))

    def keep_promise(self, entry: "Entry") -> None:
        """It is done, or will not be: the names are what the database says."""
        order, save, run = entry.record.order, entry.record.save, entry.run
        if save is None or run is None or not isinstance(order, Save):
            return
        if save.name is not None and run.saving.get((save.kind, save.name)) == order.folder:
            del run.saving[save.kind, save.name]
        if save.sampling_session_seq_id is not None:
            self.promised_samplers.discard(sampler_id_of(run.session_id, save.sampling_session_seq_id))

    def touch(self, session_id: str) -> None:
        if (session := self.sessions.get(session_id)) is not None:
            session.touch()

    def heard_of(self, tenant: str, request_id: str) -> None:
        """Somebody asks for the result of a request."""
        entry = self.pending.get(request_id)
        if entry is None or entry.tenant != tenant:
            return
        owner = entry.run or self.samplers.get(entry.sampler_id or "")
        if owner is not None:
            self.touch(owner.session_id)

    def session(self, tenant: str, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None or session.tenant != tenant or session.ending is not None:
            raise RequestError(f"session_id {session_id!r} is no live session: it ended, or never was", 404)
        session.touch()
        return session

    def run(self, tenant: str, model_id: str) -> Run:
        run = self.runs.get(model_id)
        if run is None or run.tenant != tenant or run.unloading is not None:
            raise RequestError(f"model_id {model_id!r} is no live model: it was unloaded, or never was", 404)
        self.touch(run.session_id)
        return run

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.tenant != tenant:
            raise RequestError(f"sampling session {sampler_id!r} is not there: its session ended, or never was", 404)
        self.touch(sampler.session_id)
        return sampler

    def folders_in_use(self) -> set[str]:
        """Folders that work under way, or doing it again, may read or write."""
        folders = {folder for run in self.runs.values() for folder in run.needed_folders.values()}
        for entry in self.pending.values():
            order = entry.record.order
            folder = order.adapter if isinstance(order, Sample) else getattr(order, "folder", None)
            if folder is not None:
                folders.add(folder)
        return folders
