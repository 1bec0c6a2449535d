"""Scheduler of the training thread: a queue of commands for each model, fair shares for each tenant.

A turn has two halves: quick commands (all but passes) at the heads of queues, in rounds of one command per tenant; then
one pass, made of one micro-batch of each of several models. So a command waits for at most one pass and one command of
each other tenant.

Models in memory have priority (`Models.admitted`): queues of other models are not ready until a swap is due for them,
and their tenants count as idle.

A tenant's share of the passes is counted in tokens, whatever the number of its models. The tenant with the least is
served first, and once it has no more work the pass is closed even if it has room: further micro-batches of others would
delay its next one.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tx.tinker.commands import ModelCommand, Train, Unload
from tx.tinker.engine.shares import Shares

MICRO_BATCH_COST = 64
"""Tokens charged per micro-batch in addition to its own: many small ones cost time too."""


@dataclass(eq=False)
class ModelQueue:
    """Commands of one model; the first is in progress or next."""

    model_id: str
    tenant: str
    commands: deque[ModelCommand] = field(default_factory=deque)
    held: bool = False
    """The first command waits for work outside the training thread."""
    last_turn: int = 0
    since: float = 0.0
    """Time at which the first command became the first."""


class Scheduler:
    """Scheduler that holds the command queues and selects the next commands.

    Args:
        admitted: selects the models that may run now, given the start of each one's wait.
        now: seconds.
    """

    def __init__(
        self,
        admitted: Callable[[Mapping[str, float]], Collection[str]] = lambda since: since,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admitted, self._now = admitted, now
        self._queues: dict[str, ModelQueue] = {}  # none of them empty
        self._shares = Shares()
        self._turn = 0
        self.num_commands = 0

    def add(self, command: ModelCommand) -> None:
        """Append a command to the queue of its model."""
        queue = self._queues.get(command.model_id)
        if queue is None:
            queue = self._queues[command.model_id] = ModelQueue(
                command.model_id, command.tenant, last_turn=self._increment_turn(), since=self._now()
            )
        queue.commands.append(command)
        self.num_commands += 1

    def finish(self, queue: ModelQueue) -> None:
        """Remove the first command, which is done or failed."""
        queue.commands.popleft()
        queue.held, queue.since = False, self._now()
        self.num_commands -= 1
        if not queue.commands:
            del self._queues[queue.model_id]

    def quick_round(self) -> list[ModelQueue]:
        """Return the longest waiting queue with a quick first command of each tenant."""
        first: dict[str, ModelQueue] = {}
        for queue in self._get_ready(passes=False):
            first.setdefault(queue.tenant, queue)
        for queue in first.values():
            queue.last_turn = self._increment_turn()
        return list(first.values())

    def pass_candidates(self) -> Iterator[ModelQueue]:
        """Yield queues whose micro-batch may join this pass, best first. The caller charges each joining
        queue (`charge`) before requesting the next; queues that cannot join now are skipped."""
        waiting: dict[str, deque[ModelQueue]] = {}
        for queue in self._get_ready(passes=True):
            waiting.setdefault(queue.tenant, deque()).append(queue)
        self._shares.begin(waiting)
        joined = set()
        while waiting:
            tenant = min(waiting, key=lambda name: (self._shares.received(name), not waiting[name]))
            if waiting[tenant]:
                before = self._shares.received(tenant)
                yield waiting[tenant].popleft()
                if self._shares.received(tenant) > before:
                    joined.add(tenant)
            elif tenant in joined:
                return
            else:
                del waiting[tenant]

    def charge(self, queue: ModelQueue, tokens: int) -> None:
        """Charge a tenant for a micro-batch that joins the pass."""
        queue.last_turn = self._increment_turn()
        self._shares.charge(queue.tenant, MICRO_BATCH_COST + tokens)

    def _get_ready(self, *, passes: bool) -> list[ModelQueue]:
        ready = [queue for queue in self._queues.values() if not queue.held]
        leaving = {queue.model_id for queue in ready if isinstance(queue.commands[0], Unload)}  # needs no memory
        waiting = {queue.model_id: queue.since for queue in ready if queue.model_id not in leaving}
        admitted = leaving.union(self._admitted(waiting))
        of_kind = (q for q in ready if isinstance(q.commands[0], Train) == passes and q.model_id in admitted)
        return sorted(of_kind, key=lambda queue: queue.last_turn)

    def _increment_turn(self) -> int:
        self._turn += 1
        return self._turn
