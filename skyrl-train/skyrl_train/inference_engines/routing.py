"""Which engine takes a request, and who waits for which: bookkeeping of one event loop, without engines.

Requests of a session go to one engine, by a consistent hash: an engine's death moves only its sessions, and they are
back when it is. Everything else goes where least is under way. With a limit on an engine's requests, the others wait in
the order in which they came; one that goes on after an interruption keeps its place.
"""

import asyncio
import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

Session = str | int


def engine_of_session(session: Session, engines: Collection[int]) -> int:
    """The engine among `engines` with the highest hash together with this session (rendezvous hashing): without any
    other engine the choice is the same."""
    return max(engines, key=lambda engine: sha256(f"{session}\n{engine}".encode()).digest())


@dataclass(frozen=True)
class Want:
    """What a request asks of the router."""

    session: Session | None = None
    num_tokens: int = 0
    """Of its prompt: decides between engines with equally many requests."""


@dataclass
class Grant:
    """The requests of a waiter that may go now."""

    places: dict[int, list[int]]
    """Engine -> numbers of wants."""
    rest: "Waiter | None"
    """Waits for the other ones, in the same place of the queue."""


class Interrupted(Exception):
    """The wait was ended by `Router.interrupt`."""


@dataclass(eq=False)
class Waiter:
    """Some requests that came together."""

    ticket: int
    """Their place: lower goes first."""
    wants: Sequence[Want]
    numbers: list[int]
    """Which of `wants` still wait."""
    granted: "asyncio.Future[Grant]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class _Load:
    requests: int = 0
    tokens: int = 0


class Router:
    """Hands out engines. Nobody is served while there is a reason to hold, nor where no engine is open.

    Args:
        num_engines: their numbers are 0 to `num_engines - 1`; all are closed at first.
        max_requests_per_engine: how many requests an engine has at a time; None: any number.
    """

    def __init__(self, num_engines: int, max_requests_per_engine: int | None = None):
        self._loads = [_Load() for _ in range(num_engines)]
        self._limit = max_requests_per_engine
        self._open: list[int] = []
        self._doubtful: set[int] = set()
        self._holds: set[str] = set()
        self._queue: list[Waiter] = []
        self._failure: Exception | None = None

    @property
    def holds(self) -> set[str]:
        """Why nobody is served now."""
        return self._holds

    @property
    def num_waiting(self) -> int:
        return sum(len(waiter.numbers) for waiter in self._queue)

    def num_under_way(self, engine: int) -> int:
        return self._loads[engine].requests

    def set_engines(self, open_engines: Collection[int], doubtful: Collection[int] = ()) -> None:
        """Who takes requests from now on.

        Args:
            doubtful: those of `open_engines` that keep their sessions, but get nothing else while others are open.
        """
        self._open, self._doubtful = sorted(open_engines), set(doubtful)
        self._serve()

    def hold(self, reason: str) -> None:
        """Serves nobody until every reason is gone."""
        self._holds.add(reason)

    def let_go(self, reason: str) -> None:
        self._holds.discard(reason)
        self._serve()

    def ask(self, ticket: int, wants: Sequence[Want]) -> Waiter:
        """Queues up. `granted_to` waits; `withdraw` ends it otherwise."""
        waiter = Waiter(ticket, wants, list(range(len(wants))))
        if self._failure is not None:
            waiter.granted.set_exception(self._failure)
            return waiter
        bisect.insort(self._queue, waiter, key=lambda waiting: waiting.ticket)
        self._serve()
        return waiter

    async def granted_to(self, waiter: Waiter) -> Grant:
        """Waits until at least one of the requests may go. Each place must be given back by `release`.

        Raises:
            Interrupted: by `interrupt`.
        """
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self.withdraw(waiter)
            raise

    def withdraw(self, waiter: Waiter | None) -> None:
        """Nobody wants what this waiter waits for, or was just granted."""
        if waiter is None:
            return
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            grant = waiter.granted.result()
            for engine, numbers in grant.places.items():
                self.release(engine, [waiter.wants[number] for number in numbers])
            self.withdraw(grant.rest)
            return
        waiter.granted.cancel()

    def release(self, engine: int, wants: Sequence[Want]) -> None:
        """These requests have ended on their engine."""
        load = self._loads[engine]
        load.requests -= len(wants)
        load.tokens -= sum(want.num_tokens for want in wants)
        self._serve()

    def interrupt(self) -> None:
        """Ends every wait there is."""
        self._end_all(Interrupted())

    def fail(self, error: Exception) -> None:
        """Ends every wait, and every later one, with `error`."""
        self._failure = error
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        queue, self._queue = self._queue, []
        for waiter in queue:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def _serve(self) -> None:
        """First come, first served: a later one passes only to an engine that no earlier one could have had."""
        if self._holds or not self._open or not self._queue:
            return
        waiting: list[Waiter] = []
        for place, waiter in enumerate(self._queue):
            if self._all_full():
                waiting += self._queue[place:]
                break
            rest = self._serve_one(waiter)
            if rest is not None:
                waiting.append(rest)
        self._queue = waiting

    def _serve_one(self, waiter: Waiter) -> Waiter | None:
        """Grants what can go; returns who waits for the rest."""
        places: dict[int, list[int]] = {}
        remaining: list[int] = []
        for number in waiter.numbers:
            want = waiter.wants[number]
            engine = self._engine_for(want)
            if engine is None:
                remaining.append(number)
                continue
            places.setdefault(engine, []).append(number)
            self._loads[engine].requests += 1
            self._loads[engine].tokens += want.num_tokens
        if not places:
            return waiter
        rest = Waiter(waiter.ticket, waiter.wants, remaining) if remaining else None
        waiter.granted.set_result(Grant(places, rest))
        return rest

    def _engine_for(self, want: Want) -> int | None:
        """Where a request goes now; None where it must wait."""
        if want.session is not None:
            engine = engine_of_session(want.session, self._open)
            return None if self._is_full(engine) else engine
        sure = [engine for engine in self._open if engine not in self._doubtful]
        free = [engine for engine in sure or self._open if not self._is_full(engine)]
        return min(free, key=lambda engine: (self._loads[engine].requests, self._loads[engine].tokens), default=None)

    def _is_full(self, engine: int) -> bool:
        return self._limit is not None and self._loads[engine].requests >= self._limit

    def _all_full(self) -> bool:
        return self._limit is not None and all(map(self._is_full, self._open))
