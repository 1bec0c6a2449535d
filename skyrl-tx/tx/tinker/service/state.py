"""State of the server in memory: a copy of rows, with transient fields. Lookups check the tenant."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

from tx.errors import RequestError
from tx.tinker.commands import Save, StoredCommand
from tx.tinker.service.results import StoredResult
from tx.tinker.service.sequencer import Sequencer
from tx.tinker.storage.db_models import SamplerRow
from tx.tinker.types import CheckpointKind, LoraSpec, format_sampler_id


@dataclass(eq=False)
class Session:
    """A live session."""

    session_id: str
    tenant: str
    last_heartbeat: float = field(default_factory=time.monotonic)
    """Monotonic clock of this process: after a restart every session gets the full timeout again."""
    unsaved_heartbeat: float | None = None
    """Time of the last heartbeat, if not written to its row yet."""
    ending: asyncio.Future[None] | None = None

    def touch(self) -> None:
        """Note a heartbeat or any other request of the session."""
        self.last_heartbeat, self.unsaved_heartbeat = time.monotonic(), time.time()


@dataclass(eq=False)
class PendingRequest:
    """A request that is durable and not finished."""

    request_id: str
    tenant: str
    kind: str
    stored: StoredCommand
    content: bytes | None = None
    """Hash of what was asked."""
    payload_blob: str | None = None
    payload: bytes | None = None
    """Kept only from acceptance to the first sending; later it is read from the blob."""
    run: "Run | None" = None
    seq: int | None = None
    sampler_id: str | None = None
    tokens: int = 0
    """Largest possible number of tokens of a sample: prompt and completions."""
    accepted_at: float = field(default_factory=time.monotonic)
    finished: asyncio.Future[StoredResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent_to: int = 0
    """Generation of the engine that received it."""
    recording_result: bool = False
    """The result is known and being recorded."""


@dataclass(eq=False)
class Run:
    """A model under training."""

    model_id: str
    tenant: str
    session_id: str
    base_model: str
    lora: LoraSpec
    sequence: Sequencer[PendingRequest] = field(default_factory=Sequencer[PendingRequest])
    queue: dict[str, PendingRequest] = field(default_factory=dict)
    """Due requests, in order, by request id."""
    deciding: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Seqs whose acceptance is being recorded."""
    refused: dict[int, RequestError] = field(default_factory=dict)
    delayed: dict[int, float] = field(default_factory=dict)
    """Seqs that the quota of tokens delayed, and when; later ones are delayed too, until these were accepted."""
    saving: dict[tuple[CheckpointKind, str], str] = field(default_factory=dict)
    """Folders of named checkpoints whose saves are pending."""
    needed_folders: dict[int, str] = field(default_factory=dict)
    """Checkpoint folders read by the seqs after the last snapshot; a replay reads them again."""
    snapshot: str | None = None
    snapshot_seq: int = -1
    unsaved_request_at: float | None = None
    unloading: asyncio.Future[None] | None = None
    """Done when the unload request is durable."""
    touched_in: int = 0
    """Generation of the last engine that received any command of this model."""
    resident_in: int = 0
    """Generation of the last engine that holds the whole model."""
    pumping: bool = False

    @property
    def head(self) -> PendingRequest | None:
        """The request that the engine executes for this model, or will execute next."""
        return next((pending for pending in self.queue.values() if not pending.recording_result), None)


@dataclass(eq=False)
class Sampler:
    """A live sampler."""

    sampler_id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None
    folder: str | None
    model_id: str | None = None
    """Model whose weights it has."""
    ephemeral: bool = False
    """Its weights have no name: they go with it."""
    created_at: float = 0.0
    last_used: float = field(default_factory=time.monotonic)
    accepting: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: SamplerRow) -> "Sampler":
        return cls(
            **{name: getattr(row, name) for name in ("sampler_id", "tenant", "session_id", "base_model", "model_path")},
            **{name: getattr(row, name) for name in ("folder", "model_id", "ephemeral", "created_at")},
        )


@dataclass
class ServerState:
    """Live sessions, models, samplers and pending requests, by id."""

    sessions: dict[str, Session] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    """All pending requests, by request id."""
    promised_samplers: set[str] = field(default_factory=set)
    """Ids of samplers that pending saves will create."""
    saves: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Tenant, kind and rank of the saves with a name that are under way, by request id."""
    checkpoint_bytes: dict[str, int] = field(default_factory=dict)
    """Size of the named checkpoints by tenant, at the last look."""
    free_bytes: dict[str, int] = field(default_factory=dict)
    """Free bytes of the disks of the state folder and of local checkpoints, at the last look."""

    def promise(self, pending: "PendingRequest") -> None:
        """Reserve the names that a `Save` will use."""
        command, save, run = pending.stored.command, pending.stored.save, pending.run
        if save is None or run is None or not isinstance(command, Save):
            return
        if save.name is not None:
            run.saving[save.kind, save.name] = command.folder
            self.saves[pending.request_id] = (pending.tenant, save.kind, run.lora.rank)
        if save.sampling_session_seq_id is not None:
            self.promised_samplers.add(format_sampler_id(run.session_id, save.sampling_session_seq_id))

    def keep_promise(self, pending: "PendingRequest") -> None:
        """Release the names reserved by `promise`: the request ended."""
        command, save, run = pending.stored.command, pending.stored.save, pending.run
        self.saves.pop(pending.request_id, None)
        if save is None or run is None or not isinstance(command, Save):
            return
        if save.name is not None and run.saving.get((save.kind, save.name)) == command.folder:
            del run.saving[save.kind, save.name]
        if save.sampling_session_seq_id is not None:
            self.promised_samplers.discard(format_sampler_id(run.session_id, save.sampling_session_seq_id))

    def touch(self, session_id: str) -> None:
        """Note a request of a session."""
        if (session := self.sessions.get(session_id)) is not None:
            session.touch()

    def record_poll(self, tenant: str, request_id: str) -> None:
        """Record a poll for the result of a request: its session is alive."""
        pending = self.pending.get(request_id)
        if pending is None or pending.tenant != tenant:
            return
        owner = pending.run or self.samplers.get(pending.sampler_id or "")
        if owner is not None:
            self.touch(owner.session_id)

    def session(self, tenant: str, session_id: str) -> Session:
        """Look up a live session of the tenant. Raises: RequestError 404."""
        session = self.sessions.get(session_id)
        if session is None or session.tenant != tenant or session.ending is not None:
            raise RequestError(f"session_id {session_id!r} is not a live session: it ended or never existed", 404)
        session.touch()
        return session

    def run(self, tenant: str, model_id: str) -> Run:
        """Look up a live model of the tenant. Raises: RequestError 404."""
        run = self.runs.get(model_id)
        if run is None or run.tenant != tenant or run.unloading is not None:
            raise RequestError(f"model_id {model_id!r} is not a live model: it was unloaded or never existed", 404)
        self.touch(run.session_id)
        return run

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Look up a live sampler of the tenant. Raises: RequestError 404."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.tenant != tenant:
            raise RequestError(
                f"sampling session {sampler_id!r} does not exist: its session ended, newer samplers of its model "
                "replaced it (keep_samplers; named weights are kept), or it never existed",
                404,
            )
        self.touch(sampler.session_id)
        sampler.last_used = time.monotonic()
        return sampler

    def superseded_samplers(self, keep: int, idle_seconds: float) -> list[Sampler]:
        """Return unnamed samplers that are not among the `keep` newest of their model, have no pending requests and
        were not used for `idle_seconds`.
        """
        of_models: dict[str | None, list[Sampler]] = {}
        for sampler in self.samplers.values():
            if sampler.ephemeral:
                of_models.setdefault(sampler.model_id, []).append(sampler)
        working = {pending.sampler_id for pending in self.pending.values()}
        unused_since = time.monotonic() - idle_seconds
        return [
            sampler
            for samplers in of_models.values()
            for sampler in sorted(samplers, key=lambda sampler: sampler.created_at, reverse=True)[keep:]
            if sampler.last_used <= unused_since and not sampler.accepting and sampler.sampler_id not in working
        ]

    def folders_in_use(self) -> set[str]:
        """Return the folders that pending work, or its replay, may read or write."""
        folders = {folder for run in self.runs.values() for folder in run.needed_folders.values()}
        used = (pending.stored.command.used_folder for pending in self.pending.values())
        return folders | {folder for folder in used if folder is not None}


def start_shared(
    tasks: dict[int, asyncio.Task[None]], seq: int, work: Coroutine[object, object, None]
) -> asyncio.Task[None]:
    """Run the acceptance of a request in a task of `tasks` while it lasts, so that a disconnect has no effect, and a
    repetition meanwhile shares the result."""
    task = tasks[seq] = asyncio.create_task(work)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.pop(seq, None)
        if not task.cancelled():
            task.exception()  # retrieved here: the callers that raise it may be cancelled

    task.add_done_callback(ended)
    return task
