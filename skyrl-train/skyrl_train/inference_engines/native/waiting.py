"""Queue of requests waiting for a row: first come, first served within a group, round robin over groups.

A group (for example a tenant of a server) may hold at most `GREED` times the number of free rows, so early groups never
take all rows: with n saturating groups, 1 / (1 + GREED n) of the rows stay free for the next one (dynamic thresholds,
as in shared switch buffers: Choudhury and Hahne 1998). Requests without a group may use every row.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from skyrl_train.inference_engines.native.requests import Request

GREED = 3


class Waiting:
    """Waiting requests, and the number of rows of each group."""

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
        """Return the next request given the number of free rows; it stays queued until `take`."""
        if num_free:
            for group, queue in self._queues.items():
                if group is None or self._running[group] < GREED * num_free:
                    return queue[0]
        return None

    def take(self, request: Request) -> None:
        """Give a row to the request returned by `get_next`; its group moves to the end of the round."""
        queue = self._queues[request.group]
        queue.popleft()
        self._queues.move_to_end(request.group)
        if not queue:
            del self._queues[request.group]
        self._running[request.group] += 1
        self._count -= 1

    def release_row(self, request: Request) -> None:
        """Release the row of a request."""
        self._running[request.group] -= 1
        if not self._running[request.group]:
            del self._running[request.group]

    def remove(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the selected waiting requests."""
        removed = [request for queue in self._queues.values() for request in queue if chosen(request)]
        for group, queue in list(self._queues.items()):
            kept = deque(request for request in queue if not chosen(request))
            if kept:
                self._queues[group] = kept
            else:
                del self._queues[group]
        self._count -= len(removed)
        return removed
