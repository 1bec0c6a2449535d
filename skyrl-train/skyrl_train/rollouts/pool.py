"""Pool of groups that are generated while the trainer computes.

The scheduler decides which groups start and which are trained; the pool runs a task for each, with a deadline, and
writes what is finished to the journal.

    may a group start? -> task: generate -> journal, queue -> `next_batch`: trainer -> `record_trained`, `record_synced`

Shutdown: no new group starts, tasks are cancelled and awaited (a task that ignores the cancellation is abandoned after
`_GRACE_SECONDS`), then the journal is closed. The owner of the engines shuts them down afterwards.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType

from loguru import logger

from skyrl_gym.concurrency import raise_first_error
from skyrl_gym.waits import waiting
from skyrl_train.errors import AllRolloutsFailedError, RolloutError, SkyRLError
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.journal import RecoveredRollouts, RolloutJournal
from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits, ScheduleState
from skyrl_train.rollouts.timeline import Timeline
from skyrl_train.rollouts.types import RolloutBatch, TrajectoryGroup
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.utils.tracebacks import format_last_location

_GRACE_SECONDS = 30.0
"""Time that a cancelled group has to clean up."""

GROUPS = "the pool of groups"
"""Name under which groups, and waits for them, are recorded."""

_REPORT_SECONDS = 60.0
"""Time between log lines that say whom the trainer waits for."""


@dataclass
class PoolCounts:
    """Counts and times since they were last taken."""

    num_failed: int = 0
    num_filtered: int = 0
    num_stale: int = 0
    running_seconds: float = 0.0
    """Sum over groups of the time for which they ran."""
    busy_seconds: float = 0.0
    """Time in which any group ran."""
    wall_seconds: float = 0.0


class RolloutPool:
    """Pool of running and finished groups, as an asynchronous context manager.

    Args:
        generate: generates the group for a ticket.
        recovered: schedule state, finished groups and started steps, initial or after a resume.
        group_timeout_seconds: deadline for the generation of one group.
        is_kept: decides whether a finished group is trained.
        max_filtered: number of consecutive groups that `is_kept` may reject.
        timeline: records when each group ran.
        on_finished: called when another group is in the queue.

    Raises (from the block of the context manager, at once):
        SkyRLError: an error that ends the run (settings, a crashed engine, a full disk); or as many consecutive groups
            failed as may run concurrently.
    """

    def __init__(
        self,
        generate: Callable[[int], Awaitable[RolloutBatch]],
        limits: ScheduleLimits,
        recovered: RecoveredRollouts,
        journal: RolloutJournal,
        *,
        group_timeout_seconds: float,
        is_kept: Callable[[TrajectoryGroup], bool] = lambda group: True,
        max_filtered: int | None = None,
        timeline: Timeline | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ):
        versions = {ticket: group.get_staleness_version(limits.on_stale) for ticket, group in recovered.groups.items()}
        self.scheduler = GroupScheduler(limits, replace(recovered.state, finished=versions))
        self._generate = generate
        self._finished = dict(recovered.groups)
        self._begun = dict(recovered.batches)
        self._journal = journal
        self._timeout = group_timeout_seconds
        self._is_kept, self._max_filtered = is_kept, max_filtered
        self._on_finished = on_finished
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left_behind: set[asyncio.Future[RolloutBatch]] = set()
        self._task_group = asyncio.TaskGroup()
        self._changed = asyncio.Event()
        self._timeline = timeline or Timeline()
        self._is_open = False
        self._failures_in_a_row = self._filtered_in_a_row = 0
        self._counts, self._counted_until = PoolCounts(), time.monotonic()

    async def __aenter__(self) -> "RolloutPool":
        await self._task_group.__aenter__()
        self._is_open = True
        self._start_groups()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        # Cancelled here although the task group would cancel them after an error: after a run that ended well it would
        # wait for groups that are no longer needed.
        for task in self._tasks.values():
            task.cancel()
        try:
            with raise_first_error():
                await self._task_group.__aexit__(kind, error, traceback)
        finally:
            self._journal.close()

    # ---- the trainer's side

    @property
    def num_finished(self) -> int:
        """Number of groups in the queue for training."""
        return len(self._finished)

    async def next_batch(self) -> list[FinishedGroup]:
        """Wait for the groups of the next training step. They stay in the queue until `trained`.

        Raises:
            SkyRLError: no group runs or may start, and the finished groups do not fill a step.
        """
        step = self.scheduler.num_trained_steps + 1
        while (tickets := self._get_next_tickets(step)) is None:
            if not self._tasks:
                raise SkyRLError(
                    f"training step {step} has no groups to wait for: {self.scheduler.describe_why_no_batch()}; "
                    f"{self.scheduler.describe_why_not_started()}"
                )
            await self._wait(f"training step {step}: {self.scheduler.describe_why_no_batch()}")
        if step not in self._begun:
            self._journal.append_batch(step, tickets)
        return [self._finished[ticket] for ticket in tickets]

    def get_predicted_batch(self) -> dict[int, TrajectoryGroup]:
        """Return the finished groups that the next training step will probably consume, keyed by position in its
        batch."""
        begun = self._begun.get(self.scheduler.num_trained_steps + 1)
        tickets = self.scheduler.predict_next_batch() if begun is None else dict(enumerate(begun))
        return {place: self._finished[ticket].group for place, ticket in tickets.items() if ticket in self._finished}

    def _get_next_tickets(self, step: int) -> list[int] | None:
        """Return the tickets of a step; first the tickets of a step that a killed run had started."""
        begun = self._begun.get(step)
        if begun is not None and all(ticket in self._finished for ticket in begun):
            return begun
        self._begun.pop(step, None)
        return self.scheduler.get_next_batch()

    def record_trained(self, groups: list[FinishedGroup], *, sync_follows: bool = False) -> None:
        """Record a training step over these groups, and restart groups that it made stale.

        Args:
            sync_follows: start no group before `synced`, since it would be one step staler than with the new weights.
        """
        # The scheduler comes first: if it refuses a ticket, nothing has left the queue.
        self.scheduler.record_trained([group.ticket for group in groups])
        for group in groups:
            del self._finished[group.ticket]
        self._begun.pop(self.scheduler.num_trained_steps, None)
        self._requeue_stale()
        self._is_open = self._is_open and not sync_follows
        self._start_groups()

    def record_synced(self, version: int) -> None:
        """Record that the engines have the weights after `version` steps, and start more groups."""
        self.scheduler.record_synced(version)
        self._is_open = True
        self._start_groups()

    async def drain(self) -> None:
        """Start no more groups and wait until none runs. `synced` resumes the generation."""
        self._is_open = False
        while self._tasks:
            await self._wait(
                f"a weight sync, which requires that no group is in flight: {len(self._tasks)} groups are running"
            )

    def state(self) -> ScheduleState:
        """Return the state of the schedule for a checkpoint, and mark the checkpoint in the journal."""
        self._journal.mark_checkpoint([self._finished[ticket] for ticket in self.scheduler.finished_groups])
        return self.scheduler.state()

    def compact_journal(self) -> None:
        """Compact the journal once the checkpoint of the last `state` is complete."""
        self._journal.compact()

    def take_counts(self) -> PoolCounts:
        """Return the counts since the last call."""
        self._count_time()
        counts, self._counts = self._counts, PoolCounts()
        return counts

    async def _wait(self, reason: str) -> None:
        """Wait until a group ends. Bounded, since every group has a deadline."""
        # No await between the caller's look at the state and this: an end in between would be missed.
        self._changed.clear()
        with self._timeline.waiting(reason), waiting(f"groups, {reason}", on=GROUPS):
            while True:
                try:
                    async with asyncio.timeout(_REPORT_SECONDS):
                        await self._changed.wait()
                    return
                except TimeoutError:
                    logger.info(f"waiting for more than {_REPORT_SECONDS:g} s: {reason}")

    # ---- groups

    def _start_groups(self) -> None:
        self._count_time()
        while self._is_open and self.scheduler.can_start():
            ticket = self.scheduler.start()
            self._timeline.group_started(ticket, self.scheduler.version)
            self._tasks[ticket] = self._task_group.create_task(self._run(ticket), name=f"group {ticket}")

    def _requeue_stale(self) -> None:
        """Requeue stale groups, and cancel running stale groups."""
        stale = self.scheduler.requeue_stale()
        if stale:
            self._journal.append_stale(stale, deferred=self.scheduler.limits.on_stale == "drop")
            self._counts.num_stale += len(stale)
        for ticket in stale:
            self._finished.pop(ticket, None)
            # Out of the table at once: `regenerate` may start the same ticket again before its old task has ended.
            if ticket in self._tasks:
                self._tasks.pop(ticket).cancel()
                self._timeline.group_ended(ticket, "stale")

    async def _run(self, ticket: int) -> None:
        try:
            with waiting(f"group {ticket}", who=GROUPS, deadline=self._timeout):
                await self._generate_group(ticket)
        except Exception:  # ends the run: no group may start during shutdown
            self._is_open = False
            raise
        self._start_groups()
        self._changed.set()

    async def _generate_group(self, ticket: int) -> None:
        """Generate a group until it finishes, fails or times out."""
        version, began, why = self.scheduler.version, time.monotonic(), ""
        # A task of its own, waited for: `asyncio.timeout` would wait for one that ignores its cancellation.
        generation = asyncio.ensure_future(self._generate(ticket))
        try:
            await asyncio.wait([generation], timeout=self._timeout)
            is_late = not generation.done()
            if is_late:
                late = f"group {ticket} did not finish within {self._timeout:g} s (group_timeout_seconds)"
                why = await asyncio.to_thread(write_explanation, late)
        finally:
            await self._cancel_generation(ticket, generation)
        # No await from here to the end: journal, queue and scheduler change atomically.
        self._count_time()
        del self._tasks[ticket]
        if is_late:
            self._handle_failure(
                ticket, TimeoutError(f"did not finish within {self._timeout:g} s (group_timeout_seconds){why}")
            )
        elif generation.cancelled():
            self._handle_failure(ticket, RuntimeError("cancelled by the generator"))
        elif (error := generation.exception()) is None:
            self._handle_finished(ticket, generation.result(), version, time.monotonic() - began)
        elif isinstance(error, Exception) and (not isinstance(error, SkyRLError) or isinstance(error, RolloutError)):
            self._handle_failure(ticket, error)
        else:
            raise error

    async def _cancel_generation(self, ticket: int, generation: "asyncio.Future[RolloutBatch]") -> None:
        """Cancel an unfinished generation and give it time to clean up."""
        self._left_behind.add(generation)
        generation.add_done_callback(self._remove_task)
        if generation.done():
            return
        generation.cancel()
        await asyncio.wait([generation], timeout=_GRACE_SECONDS)
        if not generation.done():
            logger.warning(
                f"group {ticket} was cancelled but is still running after {_GRACE_SECONDS:g} s; it is abandoned"
            )

    def _remove_task(self, generation: "asyncio.Future[RolloutBatch]") -> None:
        self._left_behind.discard(generation)
        if not generation.cancelled():
            generation.exception()  # retrieved, so that asyncio does not report it again

    def _handle_finished(self, ticket: int, rollouts: RolloutBatch, version: int, seconds: float) -> None:
        if len(rollouts.groups) != 1:
            raise SkyRLError(
                f"the generator received one prompt and returned {len(rollouts.groups)} groups: every trajectory id "
                "must refer to this prompt"
            )
        [group] = rollouts.groups
        finished = FinishedGroup(ticket=ticket, group=group, metrics=rollouts.metrics, version=version, seconds=seconds)
        self.scheduler.record_finished(ticket, finished.get_staleness_version(self.scheduler.limits.on_stale))
        self._failures_in_a_row = 0
        is_kept = self._is_kept(group)
        self._timeline.group_ended(ticket, "finished" if is_kept else "filtered")
        if is_kept:
            self._journal.append_finished(finished)
            self._finished[ticket] = finished
            self._filtered_in_a_row = 0
            # With `on_stale=mask` it may be too old from the start: no token of it could be trained.
            self._requeue_stale()
            self._on_finished()
            return
        self._journal.append_filtered(ticket)
        self.scheduler.record_filtered(ticket)
        self._counts.num_filtered += 1
        self._filtered_in_a_row += 1
        if self._max_filtered is not None and self._filtered_in_a_row > self._max_filtered:
            raise SkyRLError(
                f"{self._filtered_in_a_row} groups in a row have samples with equal rewards and are dropped "
                "(trainer.fully_async.sample_full_batch): the problems are too easy or too hard for this policy. "
                "Change the data, raise generator.n_samples_per_prompt or "
                "trainer.algorithm.dynamic_sampling.max_sample_batches"
            )

    def _handle_failure(self, ticket: int, error: Exception) -> None:
        """Replace a group whose generation failed.

        Raises:
            AllRolloutsFailedError: as many consecutive groups failed as may run concurrently.
        """
        self._timeline.group_ended(ticket, "failed")
        self._journal.append_failed(ticket)
        self.scheduler.record_failed(ticket)
        self._counts.num_failed += 1
        self._failures_in_a_row += 1
        cause = f"{type(error).__name__}: {error}{format_last_location(error)}"
        logger.warning(f"group {ticket} failed and is replaced by another: {cause}")
        if self._failures_in_a_row >= self.scheduler.limits.max_running:
            raise AllRolloutsFailedError(
                f"the last {self._failures_in_a_row} groups (the number that run concurrently) failed; "
                f"the last: {cause}"
            ) from error

    def _count_time(self) -> None:
        now = time.monotonic()
        elapsed, self._counted_until = now - self._counted_until, now
        num_running = len(self._tasks)
        self._counts.wall_seconds += elapsed
        self._counts.running_seconds += elapsed * num_running
        self._counts.busy_seconds += elapsed if num_running else 0.0
