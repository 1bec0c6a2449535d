"""Scheduler of asynchronous rollouts: decides which groups may start, and which groups the next training step consumes.

It uses no clock, I/O or tensors; the trainer, the rollout pool and the simulator use the same object.

Notation: a training step has M groups and trains weights of version t, the number of steps before it. Engines hold the
version of their last weight sync. The age of a group in that step is t minus the version of its oldest token; with
`on_stale=mask`, which masks stale tokens, of its newest token. No group older than S (`max_staleness_steps`) is
trained. A ticket identifies a group: its position in the data over all epochs.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import TypeAdapter

Order = Literal["finished", "oldest", "exact"]
OnStale = Literal["drop", "regenerate", "mask"]


@dataclass(frozen=True, kw_only=True)
class ScheduleLimits:
    """Limits of a schedule, from the settings."""

    groups_per_step: int
    """M"""

    max_staleness_steps: int
    """S"""

    max_running: int
    """K, the number of groups that are generated at once."""

    groups_per_epoch: int
    """A multiple of M."""

    total_steps: int
    """Training steps of the run, those before a resume included."""

    order: Order = "finished"
    on_stale: OnStale = "regenerate"


@dataclass
class ScheduleState:
    """State of a schedule in a checkpoint. Running groups are restarted under the same tickets."""

    num_trained_steps: int = 0
    version: int = 0
    """Weight version of the engines."""

    next_ticket: int = 0
    """Lowest ticket that was never started."""

    finished: dict[int, int] = field(default_factory=dict)
    """Version of each group that is finished and not trained, by which it ages, in the order of finishing."""

    waiting: list[int] = field(default_factory=list)
    """Tickets to be started before any new one."""

    deferred: list[int] = field(default_factory=list)
    """Tickets to be started at the end of their epoch."""

    restarted: set[int] = field(default_factory=set)
    """Tickets that were stale once: the trainer waits for these in time, so that they do not become stale again."""

    @classmethod
    def from_num_steps(cls, num_steps: int, groups_per_step: int) -> "ScheduleState":
        """Return the state after this many steps of synchronous training."""
        return cls(num_trained_steps=num_steps, version=num_steps, next_ticket=num_steps * groups_per_step)

    @classmethod
    def from_json(cls, values: dict[str, object]) -> "ScheduleState":
        """Restore a state from `to_json`. Raises ValueError for any other value."""
        return _STATE.validate_python(values)

    def to_json(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return _STATE.dump_python(self, mode="json")


_STATE = TypeAdapter(ScheduleState)


class GroupScheduler:
    """Scheduler of trajectory groups with bounded staleness.

    `start` acquires a slot; `record_failed`, `record_filtered` or, for a stale group, `requeue_stale` release it; a
    trained group keeps it. With (S + version + 1) M slots in total, every started group can be trained at an age of at
    most S steps if the oldest groups are trained first, as in order `exact`. The other orders prefer finished groups.
    """

    def __init__(self, limits: ScheduleLimits, state: ScheduleState | None = None):
        self.limits = limits
        self._state = state or ScheduleState()
        self._running: dict[int, int] = {}
        self._awaited: set[int] = set()
        """Running groups of which one must end before there is a batch, as the last `next_batch` found."""

    # ---- state

    @property
    def num_trained_steps(self) -> int:
        return self._state.num_trained_steps

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def running(self) -> list[int]:
        """Tickets of the running groups, in order of start."""
        return list(self._running)

    @property
    def finished_groups(self) -> list[int]:
        """Tickets of the groups that wait for training, in order of completion."""
        return list(self._state.finished)

    def state(self) -> ScheduleState:
        """Return the state for a checkpoint."""
        state = ScheduleState(**asdict(self._state))
        for ticket in self._running:
            insort(state.waiting, ticket)
        return state

    def age(self, ticket: int) -> int:
        """Return the age in steps that a running or finished group would have in the next training step."""
        oldest = self._running[ticket] if ticket in self._running else self._state.finished[ticket]
        return self.num_trained_steps - oldest

    # ---- generating

    def can_start(self) -> bool:
        """Return True if a slot is free and one more group may run."""
        return len(self._running) < self.limits.max_running and self.num_free_slots > 0

    @property
    def num_free_slots(self) -> int:
        steps = min(self.limits.max_staleness_steps + self.version + 1, self.limits.total_steps)
        num_taken = (
            self.num_trained_steps * self.limits.groups_per_step + len(self._running) + len(self._state.finished)
        )
        return steps * self.limits.groups_per_step - num_taken

    def start(self) -> int:
        """Acquire a slot for the next group and return its ticket."""
        if not self.can_start():
            raise ValueError(f"no group can start: {self.describe_why_not_started()}")
        ticket = self._get_next_ticket()
        self._running[ticket] = self.version
        return ticket

    def _get_next_ticket(self) -> int:
        state = self._state
        if state.waiting:
            return state.waiting.pop(0)
        if state.deferred and state.next_ticket >= self._get_end_of_epoch(state.deferred[0]):
            return state.deferred.pop(0)
        state.next_ticket += 1
        return state.next_ticket - 1

    def _get_end_of_epoch(self, ticket: int) -> int:
        return (ticket // self.limits.groups_per_epoch + 1) * self.limits.groups_per_epoch

    def record_finished(self, ticket: int, version: int | None = None) -> None:
        """Queue a group for training.

        Args:
            version: weight version of its oldest token, with `on_stale=mask` of its newest; None: the engines' version
                at its start.
        """
        started_at = self._running.pop(ticket)
        self._state.finished[ticket] = started_at if version is None else version

    def record_failed(self, ticket: int) -> None:
        """Release the slot of a running group whose generation failed. Another group replaces it."""
        del self._running[ticket]
        self._state.restarted.discard(ticket)

    def record_filtered(self, ticket: int) -> None:
        """Release the slot of a finished group that is excluded from training. Another group replaces it."""
        del self._state.finished[ticket]
        self._state.restarted.discard(ticket)

    def requeue_stale(self) -> list[int]:
        """Release the slots of stale groups, running or finished, and requeue their tickets: at once (`regenerate`,
        `mask`) or at the end of their epoch (`drop`). Return these tickets; the caller aborts running groups. With
        `mask`, a finished group is stale if none of its tokens could be trained, so call this after `finished` as well.
        A group is requeued once; afterwards the trainer waits for it in time (`_find_urgent`)."""
        if self.limits.order == "exact":
            return []
        # What still runs may get tokens that are young enough.
        running = () if self.limits.on_stale == "mask" else self._running
        stale = [ticket for ticket in (*running, *self._state.finished) if self._is_stale(ticket)]
        for ticket in stale:
            self._running.pop(ticket, None)
            self._state.finished.pop(ticket, None)
            self._state.restarted.add(ticket)
            insort(self._state.deferred if self.limits.on_stale == "drop" else self._state.waiting, ticket)
        return stale

    def _is_stale(self, ticket: int) -> bool:
        return self.age(ticket) > self.limits.max_staleness_steps

    # ---- training

    def get_next_batch(self) -> list[int] | None:
        """Return the tickets of the next training step without changing state; None if some of them still run or there
        are fewer than M groups."""
        num, finished = self.limits.groups_per_step, self._state.finished
        # Called after each finished group; the result is the same while the groups that it waits for are running.
        if len(finished) < num or (self._awaited and self._awaited <= self._running.keys()):
            return None
        self._awaited = set()
        if self.limits.order == "exact":
            first = sorted([*self._running, *finished, *self._state.waiting])[:num]
            self._awaited.update([ticket for ticket in first if ticket in self._running][:1])
            return first if all(ticket in finished for ticket in first) else None
        urgent = self._find_urgent()
        if urgent is None:
            return None
        taken = set(urgent)
        # After a resume, weights may be older than those that wrote a group of the journal: it waits for its step.
        first, last = self._get_oldest_version(), self.num_trained_steps
        rest = [ticket for ticket, version in finished.items() if first <= version <= last and ticket not in taken]
        if self.limits.order == "oldest":
            rest.sort()
        return [*urgent, *rest][:num] if len(urgent) + len(rest) >= num else None

    def predict_next_batch(self) -> dict[int, int]:
        """Return finished groups that the next training step will consume, as tickets keyed by position in its batch.
        Only certain entries are returned: none for order `oldest` or if restarted groups may take precedence."""
        num, finished = self.limits.groups_per_step, self._state.finished
        if self.limits.order == "exact":
            first = sorted([*self._running, *finished, *self._state.waiting])[:num]
        elif self.limits.order == "finished" and not self._state.restarted:
            oldest, newest = self._get_oldest_version(), self.num_trained_steps
            first = [ticket for ticket, version in finished.items() if oldest <= version <= newest][:num]
        else:
            first = []
        return {place: ticket for place, ticket in enumerate(first) if ticket in finished}

    def _find_urgent(self) -> list[int] | None:
        """Return the restarted groups that this step must consume so that all restarted groups are trained in time;
        None if it must consume more than are finished.

        The i oldest, due at version + S at the latest, can all be consumed later if the steps after this one up to the
        due step have i slots. A step that consumes the groups in excess of that leaves a solvable problem of the same
        kind, since no more groups are started on a version than its steps up to S have slots.
        """
        num, finished, first = self.limits.groups_per_step, self._state.finished, self._get_oldest_version()
        present = self._running | finished if self._state.restarted else {}
        oldest = sorted(
            (version, ticket) for ticket in self._state.restarted if (version := present.get(ticket, -1)) >= first
        )
        urgent: list[int] = []
        ready = deque[int]()
        for count, (version, ticket) in enumerate(oldest, 1):
            if ticket in finished:
                ready.append(ticket)
            num_later_places = num * (version - first)
            while len(urgent) < min(num, count - num_later_places):
                if not ready:
                    self._awaited.update(ticket for _, ticket in oldest[:count] if ticket in self._running)
                    return None
                urgent.append(ready.popleft())
        return urgent

    def _get_oldest_version(self) -> int:
        """Return the lowest version that the next step accepts."""
        return max(0, self.num_trained_steps - self.limits.max_staleness_steps)

    def record_trained(self, tickets: Iterable[int], version: int | None = None) -> None:
        """Record a training step over these groups.

        Args:
            version: weight version of the engines, if they were synced after the step.
        """
        for ticket in tickets:
            del self._state.finished[ticket]
            self._state.restarted.discard(ticket)
        self._awaited = set()
        self._state.num_trained_steps += 1
        if version is not None:
            self.record_synced(version)

    def record_synced(self, version: int) -> None:
        """Record that the engines have the weights after `version` training steps."""
        self._state.version = version

    # ---- reasons, for errors and logs

    def describe_why_not_started(self) -> str:
        """Describe why no group may start now."""
        if len(self._running) >= self.limits.max_running:
            return f"{len(self._running)} groups are running, which is the limit (num_parallel_generation_workers)"
        if self.num_free_slots > 0:
            return "a group can start"
        return (
            f"{len(self._running)} running and {len(self._state.finished)} finished groups fill the "
            f"{self.limits.max_staleness_steps + 1} steps after version {self.version} that "
            f"max_staleness_steps={self.limits.max_staleness_steps} allows, or the remaining steps of the run"
        )

    def describe_why_no_batch(self) -> str:
        """Describe which groups the next training step waits for."""
        finished, num = len(self._state.finished), self.limits.groups_per_step
        awaited = self._awaited or (self._running if self.limits.order == "exact" else ())
        names = ", ".join(map(str, sorted(awaited)[:num])) or "any"
        return f"{finished} of {num} groups are finished, {len(self._running)} are running; waiting for group {names}"
