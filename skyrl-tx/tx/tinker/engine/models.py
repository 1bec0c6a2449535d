"""Models of the engine: residency in memory and snapshots on disk.

A snapshot is the state of a model after one of its commands, restored bit for bit. So a model is evicted when others
need the memory, and a crash costs a replay of the commands after the snapshot. Snapshots are frequent enough for that
to take seconds, and rare enough to cost a small part of the time.

Old snapshots are removed by the API process, once it has recorded a newer one. Called from the training thread.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from tx.errors import ModelError
from tx.tinker.backends.base import TrainingBackend
from tx.tinker.commands import Job, Steps
from tx.tinker.engine.messages import Snapshotted
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import DamagedFilesError
from tx.tinker.types import LoraSpec


def resume_steps(steps: Steps, outcome: Future[object] | None) -> Job:
    """Resume steps with the outcome of a job (None: start); errors are raised inside the steps. Returns: the next job.

    Raises:
        StopIteration: at the end.
    """
    if outcome is None:
        return next(steps)
    if error := outcome.exception():
        return steps.throw(error)
    return steps.send(outcome.result())


def run_here(steps: Steps) -> object:
    """Run steps and wait for each of their jobs."""
    outcome = None
    with ThreadPoolExecutor(1) as pool:
        try:
            while True:
                outcome = pool.submit(resume_steps(steps, outcome))
                wait((outcome,))
        except StopIteration as end:
            return end.value


REPLAY_SECONDS = 2.0
"""Maximum compute time of a model, in seconds, that a crash may make necessary to repeat."""
COST_RATIO = 10
"""Minimum compute time between snapshots of a model, as a multiple of the duration of its last one: snapshots take at
most a tenth of the time."""
REPLAY_BYTES = 64 << 20
"""Maximum total size of requests kept for replay."""
SWAP_RATIO = 4
"""Time between two swaps while models in memory have work, as a multiple of the duration of the last one: swaps take a
quarter of the time, unless some would wait too long."""
LONGEST_WAIT_SECONDS = 20.0
"""Time within which each of the models that wait for a place in memory gets one: with many, swaps are more frequent."""
MAX_SWAPS = 8
"""Maximum number of swaps at a time that were due while a pass was under way."""
ACTIVE_SECONDS = 2.0
"""Of models used more recently than this, the one that has been in memory longest leaves first, so that all of them
take turns; others leave before, least recently used first."""
REST_SECONDS = 5.0
"""Idle time after which a model is snapshotted, so that it needs no replay."""


@dataclass(eq=False)
class Model:
    """State of a model in the engine."""

    model_id: str
    tenant: str
    lora: LoraSpec
    seq: int = -1
    """Seq of the last executed command."""
    snapshot: str | None = None
    """Folder; None: it is as it was created, if it is unchanged."""
    in_memory: bool = False
    changed: bool = False
    """True if the model changed since its snapshot."""
    being_written: bool = False
    """True while its snapshot, already copied from memory, is being written to disk."""
    damaged: str | None = None
    """Reason why it cannot continue."""
    seconds: float = 0.0
    """Compute time since the snapshot."""
    request_bytes: int = 0
    snapshot_seconds: float = 0.0
    """Time of the training thread that the last snapshot took."""
    last_used: float = 0.0
    loaded_at: float = 0.0

    @property
    def needs_no_slot(self) -> bool:
        """True if its commands can be executed, or rejected, without allocating memory for the model."""
        return self.in_memory or self.damaged is not None


class Models:
    """
    Args:
        training: the backend
        folders: where snapshots stand
        limit: models in memory at a time
        now: seconds
    """

    def __init__(
        self, training: TrainingBackend, folders: Folders, limit: int, now: Callable[[], float] = time.monotonic
    ):
        self._training, self._folders, self._limit, self._now = training, folders, limit, now
        self._models: dict[str, Model] = {}
        self._completed: list[Snapshotted] = []
        self._entering: set[str] = set()
        """Models that may take the place of another one in memory now."""
        self._swap_seconds = self._swap_interval = 0.0
        self._swaps_counted_to = 0.0
        """Time until which due swaps were made."""

    def add(self, model: Model) -> Model:
        self._models[model.model_id] = model
        return model

    def get(self, model_id: str) -> Model | None:
        return self._models.get(model_id)

    def forget(self, model_id: str) -> None:
        """Unload a model for good."""
        if self._models.pop(model_id, None) is not None:
            self._training.forget(model_id)

    def num_in_memory(self) -> int:
        return sum(model.in_memory for model in list(self._models.values()))  # a copy: another thread may ask

    def changed(self) -> list[Model]:
        """Return the models that changed since their snapshot and have none being written, least recently used
        first."""
        models = (
            m for m in self._models.values() if m.changed and m.in_memory and not m.being_written and not m.damaged
        )
        return sorted(models, key=lambda model: model.last_used)

    def is_writing(self) -> bool:
        """Return True while a snapshot is being written."""
        return any(model.being_written for model in self._models.values())

    def completed_snapshots(self) -> list[Snapshotted]:
        """Return the snapshots completed since the last call; report them after the results of the commands they
        contain."""
        completed, self._completed = self._completed, []
        return completed

    # ---- memory

    def admitted(self, since: Mapping[str, float]) -> set[str]:
        """Select the models that may run commands now.

        These are the models in memory, and as many others as fit. Of the rest, which need an eviction, the longest
        waiting are admitted, as many as swaps are due; at least one if no model in memory has work.

        Args:
            since: start of the wait of each model with a ready command.
        """
        at_hand = {model_id for model_id in since if (model := self._models.get(model_id)) and model.needs_no_slot}
        absent = sorted(since.keys() - at_hand, key=lambda model_id: since[model_id])
        now, room = self._now(), max(0, self._limit - self.num_in_memory())
        self._swap_interval = min(SWAP_RATIO * self._swap_seconds, LONGEST_WAIT_SECONDS / max(1, len(absent)))
        self._swaps_counted_to = max(self._swaps_counted_to, now - MAX_SWAPS * self._swap_interval)
        num_due = int((now - self._swaps_counted_to) / self._swap_interval) if self._swap_interval else 1
        self._entering = set(absent[: room + max(num_due, not at_hand)])
        return at_hand | self._entering

    def onload(self, model: Model, is_busy: Callable[[str], bool]) -> bool:
        """Load the model into memory, and evict another one if there is no room.

        Args:
            is_busy: models that cannot be evicted now

        Returns:
            False: no free slot now; some model is busy.

        Raises:
            ModelError: the files cannot be read.
            Exception: from the backend or the disk: the evicted model cannot be written.
        """
        began = model.last_used = self._now()
        if model.in_memory:
            return True
        is_swap = self.num_in_memory() >= self._limit
        if is_swap and model.model_id not in self._entering:  # it has left since it was admitted
            return False
        while self.num_in_memory() >= self._limit:
            leaving = [m for m in self._models.values() if m.in_memory and not m.being_written]
            leaving = [m for m in leaving if not is_busy(m.model_id)]
            if not leaving:
                return False
            self._offload(min(leaving, key=self._get_eviction_key))
        if model.snapshot is None:
            self._training.create(model.model_id, model.lora)
        else:
            self._training.restore(model.model_id, model.lora, self._verify_folder(model.snapshot))
        model.in_memory, model.loaded_at = True, self._now()
        if is_swap:
            self._swap_seconds = model.loaded_at - began
            self._swaps_counted_to = min(self._swaps_counted_to + self._swap_interval, model.loaded_at)
        return True

    def _get_eviction_key(self, model: Model) -> tuple[bool, float]:
        is_active = self._now() - model.last_used < ACTIVE_SECONDS
        return is_active, model.loaded_at if is_active else model.last_used

    def _verify_folder(self, snapshot: str) -> Path:
        try:
            return self._folders.verified(snapshot)
        except DamagedFilesError as error:
            logger.error("snapshot {}: {}", snapshot, error)
            raise ModelError(
                f"the model's state is damaged on the server's disk: {error}. Create a model from its last checkpoint",
                "server",
            ) from None

    def _offload(self, model: Model) -> None:
        if model.changed and not model.damaged:
            run_here(self.write_snapshot(model))  # must be complete before the memory is freed
        self._training.forget(model.model_id)
        model.in_memory = False

    # ---- snapshots

    def done(self, model: Model, seq: int, *, seconds: float, num_bytes: int = 0, changed: bool) -> None:
        """Count an executed command and its compute seconds."""
        model.seq, model.last_used = seq, self._now()
        if changed:
            model.changed = True
            model.seconds += seconds
            model.request_bytes += num_bytes

    def is_due(self, model: Model) -> bool:
        """Return True if a replay would cost more than the limits."""
        if not model.changed or not model.in_memory or model.being_written or model.damaged:
            return False
        enough = max(REPLAY_SECONDS, COST_RATIO * model.snapshot_seconds)
        return model.seconds > enough or model.request_bytes > REPLAY_BYTES

    def at_rest(self, is_busy: Callable[[str], bool]) -> Model | None:
        """Return a changed model without recent commands."""
        for model in self.changed():
            if not is_busy(model.model_id) and self._now() - model.last_used > max(
                REST_SECONDS, COST_RATIO * model.snapshot_seconds
            ):
                return model
        return None

    def write_snapshot(self, model: Model) -> Steps:
        """Copy the model's state out of memory, then write it to disk in a job of another thread, while training
        continues."""
        started, seq = self._now(), model.seq
        folder = self._folders.place(model.model_id, f"{max(seq, 0):08d}-{secrets.token_hex(4)}")
        with ExitStack() as stack:
            local = stack.enter_context(self._folders.writing(folder))
            self._training.save(model.model_id, local, state=True)
            stand = stack.pop_all()
        before = (model.seconds, model.request_bytes)
        model.changed, model.seconds, model.request_bytes = False, 0.0, 0
        model.snapshot_seconds = self._now() - started
        model.being_written = True
        try:
            yield stand.close
        except BaseException:
            model.changed = True
            model.seconds, model.request_bytes = model.seconds + before[0], model.request_bytes + before[1]
            model.snapshot_seconds = max(model.snapshot_seconds, 1.0)  # not again at once
            raise
        finally:
            model.being_written = False
        if self._models.get(model.model_id) is model:
            model.snapshot = folder
            self._completed.append(Snapshotted(model_id=model.model_id, seq=seq, folder=folder))
        else:  # unloaded meanwhile
            self._folders.remove(folder)

    def damage(self, model: Model, what: str) -> None:
        """Mark the model damaged: it executes nothing more in this process."""
        logger.error("model {} cannot continue: {}", model.model_id, what)
        model.damaged = what

    def check(self, model: Model) -> None:
        """Check that the model is not damaged. Raises: ModelError."""
        if model.damaged:
            raise ModelError(f"the model's state was lost: {model.damaged}", "server")
