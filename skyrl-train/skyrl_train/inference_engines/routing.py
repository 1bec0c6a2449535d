"""Routing of requests to engines, and the queue of requests that wait: bookkeeping of one event loop, without engines.

A request goes where its keys and values are cached: to the engine of its session, or to the one that had the same
prompt last, if that has not much more to do than the others (bounded loads, as Mirrokni et al. 2016, with remembered
engines in place of hashes). Everything else goes to the engine with the fewest requests. With a limit on an engine's
requests, further ones wait in the order of their arrival; one that is continued after an interruption keeps its place.

Sessions that are announced before their requests come get their engines at once, a prompt's samples together and every
engine as many: one by one they would be divided by how many have come so far.
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
"""Samples of a prompt that come one by one stay together up to this many times the mean: elsewhere the prompt alone
must be computed again."""
_MAX_PLACES = 2**16
"""Sessions and prompts whose engines are remembered: the last used."""


@dataclass(frozen=True)
class SlotRequest:
    """Properties of a request that decide which engine it gets."""

    session: Session | None = None
    num_tokens: int = 0
    """Number of prompt tokens: decides between engines with equally many requests."""
    prompt: int | None = None
    """Hash of the prompt."""


class Interrupted(Exception):
    """The wait was ended by `Router.interrupt`."""


@dataclass(eq=False)
class QueueEntry:
    """Request that waits for a slot."""

    ticket: int
    """Place in the queue: lower goes first."""
    request: SlotRequest
    granted: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Engine on which it has a slot."""


@dataclass
class _Load:
    requests: int = 0
    tokens: int = 0
    announced: int = 0
    """Sessions announced for this engine that have made no request yet."""

    @property
    def sessions(self) -> int:
        """Requests that are there or announced."""
        return self.requests + self.announced


class Router:
    """Grants slots on engines. None is granted while admission is paused or no engine is open.

    Args:
        num_engines: their numbers are 0 to `num_engines - 1`; all are closed at first.
        max_requests_per_engine: slots of an engine; None: any number.
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
        """Reasons for which no slot is granted now."""
        return self._pause_reasons

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def num_under_way(self, engine: int) -> int:
        return self._loads[engine].requests

    def set_engines(self, open_engines: Collection[int], doubtful: Collection[int] = ()) -> None:
        """Set the engines that take requests from now on.

        Args:
            doubtful: those of `open_engines` that keep their sessions, but get nothing else while others are open.
        """
        self._open, self._doubtful = sorted(open_engines), set(doubtful)
        self._serve()

    def pause_admission(self, reason: str) -> None:
        """Grant no slots until every reason is gone."""
        self._pause_reasons.add(reason)

    def resume_admission(self, reason: str) -> None:
        self._pause_reasons.discard(reason)
        self._serve()

    def announce(self, groups: Sequence[Sequence[Session]]) -> None:
        """Choose the engines of sessions that will make their first requests one by one.

        Args:
            groups: sessions with the same prompt; they stay together as far as all engines get equally many.
        """
        if not self._open:
            return
        mean = (self._num_sessions() + sum(map(len, groups))) / len(self._open)
        for group in groups:
            prompt = hash(("announced", *group))
            for session in group:
                engine = self._engine_for(SlotRequest(prompt=prompt), mean, 1.0)
                if engine is None or session in self._announced:
                    continue
                self._places["prompt", prompt] = engine
                self._announced[session] = engine
                self._loads[engine].announced += 1
            self._places.pop(("prompt", prompt), None)

    def withdraw_announcement(self, groups: Sequence[Sequence[Session]]) -> None:
        """Forget those of announced sessions that made no request."""
        for group in groups:
            for session in group:
                self._announced_engine(session)

    def _announced_engine(self, session: Session | None) -> int | None:
        """Return the engine that was chosen for a session's first request, and forget it; None if there is none."""
        engine = None if session is None else self._announced.pop(session, None)
        if engine is not None:
            self._loads[engine].announced -= 1
        return engine

    def _num_sessions(self) -> int:
        return sum(self._loads[engine].sessions for engine in self._open)

    def request_slot(self, ticket: int, request: SlotRequest) -> QueueEntry:
        """Queue up. `granted` of the entry is the engine, or raises `Interrupted` or the error of `fail`. The slot must
        be given back by `release`; `withdraw` ends the wait."""
        entry = QueueEntry(ticket, request)
        if self._failure is not None:
            entry.granted.set_exception(self._failure)
            return entry
        bisect.insort(self._queue, entry, key=lambda waiting: waiting.ticket)
        self._serve()
        return entry

    def withdraw(self, entry: QueueEntry) -> None:
        """End the wait of an entry, and give back a slot that it was just granted."""
        if entry in self._queue:
            self._queue.remove(entry)
        elif entry.granted.done() and not entry.granted.cancelled() and entry.granted.exception() is None:
            self.release(entry.granted.result(), entry.request)
        entry.granted.cancel()

    def release(self, engine: int, request: SlotRequest) -> None:
        """Give back the slot of a request on an engine."""
        load = self._loads[engine]
        load.requests -= 1
        load.tokens -= request.num_tokens
        self._serve()

    def interrupt(self) -> None:
        """End every wait there is with `Interrupted`."""
        self._end_all(Interrupted())

    def fail(self, error: Exception) -> None:
        """End every wait, and every later one, with `error`."""
        self._failure = error
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        queue, self._queue = self._queue, []
        for entry in queue:
            if not entry.granted.done():
                entry.granted.set_exception(error)

    def _serve(self) -> None:
        """Grant slots in the order of the queue: a later request passes only to an engine that no earlier one could
        have had."""
        if self._pause_reasons or not self._open or not self._queue:
            return
        waiting: list[QueueEntry] = []
        for place, entry in enumerate(self._queue):
            if self._all_full():
                waiting += self._queue[place:]
                break
            if not self._grant(entry):
                waiting.append(entry)
        self._queue = waiting

    def _grant(self, entry: QueueEntry) -> bool:
        """Grant a slot if there is one for this request now."""
        request = entry.request
        mean = (self._num_sessions() + (request.session not in self._announced)) / len(self._open)
        engine = self._announced_engine(request.session)
        if engine not in self._open or engine in self._doubtful or self._is_full(engine):
            engine = self._engine_for(request, mean, _PROMPT_LOAD)
        if engine is None:
            return False
        self._remember(request, engine)
        self._loads[engine].requests += 1
        self._loads[engine].tokens += request.num_tokens
        entry.granted.set_result(engine)
        return True

    def _engine_for(self, request: SlotRequest, mean: float, prompt_load: float) -> int | None:
        """Return the engine that a request goes to now; None where it must wait.

        Args:
            mean: requests per engine, with those that are placed now.
            prompt_load: times the mean that an engine may have to get a prompt again.
        """
        sure = [engine for engine in self._open if engine not in self._doubtful]
        engine = self._places.get(("session", request.session))
        if engine in self._open and self._has_room(engine, _SESSION_LOAD * mean + 1.0):
            return engine
        engine = self._places.get(("prompt", request.prompt))
        if engine in sure and self._has_room(engine, prompt_load * mean):
            return engine
        free = [engine for engine in sure or self._open if not self._is_full(engine)]
        return min(free, key=lambda engine: (self._loads[engine].sessions, self._loads[engine].tokens), default=None)

    def _remember(self, request: SlotRequest, engine: int) -> None:
        for key in (("session", request.session), ("prompt", request.prompt)):
            if key[1] is not None:
                self._places[key] = engine
                self._places.move_to_end(key)
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    def _has_room(self, engine: int, num_requests: float) -> bool:
        """Check that an engine has at most so many requests with one more."""
        return self._loads[engine].sessions + 1 <= num_requests and not self._is_full(engine)

    def _is_full(self, engine: int) -> bool:
        return self._limit is not None and self._loads[engine].requests >= self._limit

    def _all_full(self) -> bool:
        return self._limit is not None and all(map(self._is_full, self._open))
