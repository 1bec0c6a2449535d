"""Requests that wait for a row: in the order of their arrival within a group, and the groups in turn.

A group (a tenant of a server, say) may hold at most `GREED` times as many rows as are free. So rows are never all taken
by groups that came first: with n groups that want more than they get, 1 / (1 + GREED n) of the rows stay free for the
next one (a dynamic threshold, as switches share their buffers by: Choudhury and Hahne 1998). Requests of no group take
every row there is.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from skyrl_train.inference_engines.native.requests import Request

GREED = 3


class Waiting:
    """The requests that wait, and how many rows each group holds."""

    def __init__(self):
        self._queues: OrderedDict[str | None, deque[Request]] = OrderedDict()
        self._running: Counter[str | None] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.group, deque()).append(request)
        self._count += 1

    def get_next(self, num_free: int) -> Request | None:
        """The request whose turn it is, given so many free rows; it keeps waiting until it is taken."""
        if num_free:
            for group, queue in self._queues.items():
                if group is None or self._running[group] < GREED * num_free:
                    return queue[0]
        return None

    def take(self, request: Request) -> None:
        """The request that `next` named gets a row; its group is the last in turn now."""
        queue = self._queues[request.group]
        queue.popleft()
        self._queues.move_to_end(request.group)
        if not queue:
            del self._queues[request.group]
        self._running[request.group] += 1
        self._count -= 1

    def release_row(self, request: Request) -> None:
        """A request's row is free again."""
        self._running[request.group] -= 1
        if not self._running[request.group]:
            del self._running[request.group]

    def remove(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Take out those that are chosen, without a row."""
        removed = [request for queue in self._queues.values() for request in queue if chosen(request)]
        for group, queue in list(self._queues.items()):
            kept = deque(request for request in queue if not chosen(request))
            if kept:
                self._queues[group] = kept
            else:
                del self._queues[group]
        self._count -= len(removed)
        return removed
