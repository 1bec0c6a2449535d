"""Whose turn it is on the training thread: a queue of orders for each model, shares for each tenant.

Knows no backend, no thread, no clock. A turn has two halves: quick orders (all but passes) at the heads of queues, in
rounds of one order a tenant; then one pass, made of one micro-batch of each of several models. So an order waits for at
most one pass and one order of each other tenant.

A tenant's share of the passes is counted in tokens, whatever the number of its models. The one who has had least comes
first, and when it has no more to send the pass is full, even if there were room: every further micro-batch of another
would make its next one wait.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tx.tinker.engine.messages import ModelOrder, Train
from tx.tinker.engine.shares import Shares

MICRO_BATCH_COST = 64
"""Tokens charged for a micro-batch beside its own: many small ones cost time too."""


@dataclass(eq=False)
class ModelQueue:
    """The orders of one model, the first of which is in progress or next."""

    model_id: str
    tenant: str
    orders: deque[ModelOrder] = field(default_factory=deque)
    held: bool = False
    """The first order waits for something outside the training thread."""
    last_turn: int = 0


class Scheduler:
    def __init__(self) -> None:
        self._queues: dict[str, ModelQueue] = {}  # none of them empty
        self._shares = Shares()
        self._turn = 0
        self.num_orders = 0

    def add(self, order: ModelOrder) -> None:
        queue = self._queues.get(order.model_id)
        if queue is None:
            queue = self._queues[order.model_id] = ModelQueue(order.model_id, order.tenant, last_turn=self._next_turn())
        queue.orders.append(order)
        self.num_orders += 1

    def finish(self, queue: ModelQueue) -> None:
        """The first order is done, or failed."""
        queue.orders.popleft()
        queue.held = False
        self.num_orders -= 1
        if not queue.orders:
            del self._queues[queue.model_id]

    def quick_round(self) -> list[ModelQueue]:
        """For each tenant that has some, one queue that begins with a quick order: the one that waits longest."""
        first: dict[str, ModelQueue] = {}
        for queue in self._ready(passes=False):
            first.setdefault(queue.tenant, queue)
        for queue in first.values():
            queue.last_turn = self._next_turn()
        return list(first.values())

    def pass_order(self) -> Iterator[ModelQueue]:
        """Queues whose micro-batch may join this pass, best first. The caller charges each that joins (`charge`) before
        it asks for the next; one that cannot join now is passed over."""
        waiting: dict[str, deque[ModelQueue]] = {}
        for queue in self._ready(passes=True):
            waiting.setdefault(queue.tenant, deque()).append(queue)
        self._shares.begin(waiting)
        joined = set()
        while waiting:
            tenant = min(waiting, key=lambda name: (self._shares.given(name), not waiting[name]))
            if waiting[tenant]:
                before = self._shares.given(tenant)
                yield waiting[tenant].popleft()
                if self._shares.given(tenant) > before:
                    joined.add(tenant)
            elif tenant in joined:
                return
            else:
                del waiting[tenant]

    def charge(self, queue: ModelQueue, tokens: int) -> None:
        """A micro-batch of so many tokens joins the pass."""
        queue.last_turn = self._next_turn()
        self._shares.charge(queue.tenant, MICRO_BATCH_COST + tokens)

    def _ready(self, *, passes: bool) -> list[ModelQueue]:
        ready = (q for q in self._queues.values() if not q.held and isinstance(q.orders[0], Train) == passes)
        return sorted(ready, key=lambda queue: queue.last_turn)

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn
