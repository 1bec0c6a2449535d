"""Routing of requests to engines, and the queue of waiting requests. Belongs to one event loop; independent of engines.

A request is sent to the engine with its keys and values in cache: the engine of its session, or the last engine with
the same prompt, unless that engine is overloaded (bounded loads, as in Mirrokni et al. 2016, with recorded engines
instead of hashes). All other requests are sent to the engine with the fewest requests. Above the limit per engine,
requests wait in order of arrival; a request continued after an interruption keeps its position.

Sessions that are declared in advance are assigned to engines immediately, samples of a prompt together and equally many
per engine. Assigned on arrival, they would follow the load at that time.
"""

import asyncio
import bisect
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

Session = str | int


_SESSION_LOAD = 1.5
"""A session stays on its engine up to this many times the mean number of requests, and one more: elsewhere the whole
conversation must be computed again."""
_PROMPT_LOAD = 1.2
"""Samples of a prompt that arrive one by one share an engine up to this many times the mean: elsewhere only the prompt
must be computed again.
"""
_MAX_PLACES = 2**16
"""Maximum number of recorded sessions and prompts; the least recently used are evicted."""


@dataclass(frozen=True)
class SlotRequest:
    """Properties of a request that determine its engine."""

    session: Session | None = None
    num_tokens: int = 0
    """Number of prompt tokens: breaks ties between engines with equally many requests."""
    prompt: int | None = None
    """Hash of the prompt."""


class Interrupted(Exception):
    """The wait was ended by `Router.interrupt`."""


@dataclass(eq=False)
class QueueEntry:
    """Request that waits for a slot."""

    ticket: int
    """Position in the queue, lowest first."""
    request: SlotRequest
    granted: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Engine of the granted slot."""


@dataclass
class _Load:
    requests: int = 0
    tokens: int = 0
    announced: int = 0
    """Declared sessions of this engine without a request so far."""

    @property
    def sessions(self) -> int:
        """Number of running and expected requests."""
        return self.requests + self.announced


class Router:
    """Router that grants slots on engines. None is granted while admission is paused or no engine is open.

    Args:
        num_engines: engines are numbered 0 to `num_engines - 1` and initially closed.
        max_requests_per_engine: slots per engine; None: unlimited.
    """

    def __init__(self, num_engines: int, max_requests_per_engine: int | None = None):
        self._loads = [_Load() for _ in range(num_engines)]
        self._limit = max_requests_per_engine
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        self._announced: dict[Session, int] = {}
        self._open: list[int] = []
        self._doubtful: set[int] = set()
        self._pause_reasons: set[str] = set()
        self._queue: list[QueueEntry] = []
        self._failure: Exception | None = None

    @property
    def pause_reasons(self) -> set[str]:
        """Reasons why admission is paused."""
        return self._pause_reasons

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def count_running(self, engine: int) -> int:
        return self._loads[engine].requests

    def set_engines(self, open_engines: Collection[int], doubtful: Collection[int] = ()) -> None:
        """Set the engines that accept requests from now on.

        Args:
            doubtful: engines of `open_engines` that keep their sessions, but get no other requests while others are
                open.
        """
        self._open, self._doubtful = sorted(open_engines), set(doubtful)
        self._grant_slots()

    def pause_admission(self, reason: str) -> None:
        """Grant no slots until every reason is removed."""
        self._pause_reasons.add(reason)

    def resume_admission(self, reason: str) -> None:
        self._pause_reasons.discard(reason)
        self._grant_slots()

    def register_expected(self, groups: Sequence[Sequence[Session]]) -> None:
        """Assign engines to sessions that will send their first requests one by one.

        Args:
            groups: sessions with the same prompt; they share an engine as far as load stays even.
        """
        if not self._open:
            return
        mean = (self._count_sessions() + sum(map(len, groups))) / len(self._open)
        for group in groups:
            prompt = hash(("announced", *group))
            for session in group:
                engine = self._find_engine(SlotRequest(prompt=prompt), mean, 1.0)
                if engine is None or session in self._announced:
                    continue
                self._places["prompt", prompt] = engine
                self._announced[session] = engine
                self._loads[engine].announced += 1
            self._places.pop(("prompt", prompt), None)

    def remove_expected(self, groups: Sequence[Sequence[Session]]) -> None:
        """Remove declared sessions that sent no request."""
        for group in groups:
            for session in group:
                self._pop_expected_engine(session)

    def _pop_expected_engine(self, session: Session | None) -> int | None:
        """Remove and return the engine assigned to a session's first request; None if not assigned."""
        engine = None if session is None else self._announced.pop(session, None)
        if engine is not None:
            self._loads[engine].announced -= 1
        return engine

    def _count_sessions(self) -> int:
        return sum(self._loads[engine].sessions for engine in self._open)

    def request_slot(self, ticket: int, request: SlotRequest) -> QueueEntry:
        """Queue a request. The entry's future `granted` yields the engine, or raises `Interrupted` or the error of
        `fail`. Return the slot with `release`; `withdraw` ends the wait.
        """
        entry = QueueEntry(ticket, request)
        if self._failure is not None:
            entry.granted.set_exception(self._failure)
            return entry
        bisect.insort(self._queue, entry, key=lambda waiting: waiting.ticket)
        self._grant_slots()
        return entry

    def withdraw(self, entry: QueueEntry) -> None:
        """End the wait of an entry, and release a slot that was just granted."""
        if entry in self._queue:
            self._queue.remove(entry)
        elif entry.granted.done() and not entry.granted.cancelled() and entry.granted.exception() is None:
            self.release(entry.granted.result(), entry.request)
        entry.granted.cancel()

    def release(self, engine: int, request: SlotRequest) -> None:
        """Release the slot of a request on an engine."""
        load = self._loads[engine]
        load.requests -= 1
        load.tokens -= request.num_tokens
        self._grant_slots()

    def interrupt(self) -> None:
        """End all current waits with `Interrupted`."""
        self._fail_all(Interrupted())

    def fail(self, error: Exception) -> None:
        """End all current and later waits with `error`."""
        self._failure = error
        self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        queue, self._queue = self._queue, []
        for entry in queue:
            if not entry.granted.done():
                entry.granted.set_exception(error)

    def _grant_slots(self) -> None:
        """Grant slots in queue order: a later request may overtake only to an engine that no earlier one could use."""
        if self._pause_reasons or not self._open or not self._queue:
            return
        waiting: list[QueueEntry] = []
        for place, entry in enumerate(self._queue):
            if self._are_all_full():
                waiting += self._queue[place:]
                break
            if not self._try_grant(entry):
                waiting.append(entry)
        self._queue = waiting

    def _try_grant(self, entry: QueueEntry) -> bool:
        """Grant a slot if one is available for this request. Returns whether it was granted."""
        request = entry.request
        mean = (self._count_sessions() + (request.session not in self._announced)) / len(self._open)
        engine = self._pop_expected_engine(request.session)
        if engine not in self._open or engine in self._doubtful or self._is_full(engine):
            engine = self._find_engine(request, mean, _PROMPT_LOAD)
        if engine is None:
            return False
        self._record_engine(request, engine)
        self._loads[engine].requests += 1
        self._loads[engine].tokens += request.num_tokens
        entry.granted.set_result(engine)
        return True

    def _find_engine(self, request: SlotRequest, mean: float, prompt_load: float) -> int | None:
        """Return the engine for a request; None if it must wait.

        Args:
            mean: requests per engine, including the ones being placed.
            prompt_load: maximum load of an engine, in multiples of the mean, to get the same prompt again.
        """
        sure = [engine for engine in self._open if engine not in self._doubtful]
        engine = self._places.get(("session", request.session))
        if engine in self._open and self._has_capacity(engine, _SESSION_LOAD * mean + 1.0):
            return engine
        engine = self._places.get(("prompt", request.prompt))
        if engine in sure and self._has_capacity(engine, prompt_load * mean):
            return engine
        free = [engine for engine in sure or self._open if not self._is_full(engine)]
        return min(free, key=lambda engine: (self._loads[engine].sessions, self._loads[engine].tokens), default=None)

    def _record_engine(self, request: SlotRequest, engine: int) -> None:
        for key in (("session", request.session), ("prompt", request.prompt)):
            if key[1] is not None:
                self._places[key] = engine
                self._places.move_to_end(key)
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    def _has_capacity(self, engine: int, num_requests: float) -> bool:
        """Return whether an engine would have at most `num_requests` requests with one more."""
        return self._loads[engine].sessions + 1 <= num_requests and not self._is_full(engine)

    def _is_full(self, engine: int) -> bool:
        return self._limit is not None and self._loads[engine].requests >= self._limit

    def _are_all_full(self) -> bool:
        return self._limit is not None and all(map(self._is_full, self._open))
