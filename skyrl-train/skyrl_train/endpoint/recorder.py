"""Recorder of the requests of agents and their responses, as tokens, so that a run can train on an agent that does not
know about training. Knows sessions, their turns and their budgets; `generators/recorded.py` turns them into training
samples.
"""

import asyncio
import contextlib
import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from loguru import logger

from skyrl_train.endpoint.errors import ApiError
from skyrl_train.endpoint.turn_store import RecordedTurn, TurnStore

MAX_BYTES = 4 * 2**30
"""Memory that a recorder takes for turns that nobody takes."""


@dataclass(frozen=True, kw_only=True)
class SessionRules:
    """Budget of a session, and the sampling that stands in for that of its requests. None: no limit."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling keywords that replace those of requests."""
    ignored: Sequence[str] = ()
    """Sampling keywords of requests that are left out."""
    seed_of_turn: Callable[[int], int] | None = None
    """Seed of each request, numbered from 0; None: as the request says."""
    max_turns: int | None = None
    """Number of requests that are answered."""
    max_tokens: int | None = None
    """Tokens generated in all."""
    max_tokens_per_turn: int | None = None
    """Tokens generated for one request."""

    def keywords(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling keywords of an answer, of those that a request asks for."""
        return {name: value for name, value in asked.items() if name not in self.ignored} | dict(self.sampling)


@dataclass
class SessionRecord:
    """Traffic of one session, as it is taken."""

    rules: SessionRules = field(default_factory=SessionRules)
    turns: list[RecordedTurn] = field(default_factory=list)
    num_admitted: int = 0
    """Requests that an answer was generated for, of those under way too."""
    num_answered: int = 0
    """Requests whose answer was complete."""
    used_up: str | None = None
    """Budget that refused a request: `turns`, `tokens`, or `context` if no request was answered after it."""

    @property
    def num_generated(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(eq=False)
class _Session:
    """State of one session that is open."""

    rules: SessionRules = field(default_factory=SessionRules)
    store: TurnStore = field(default_factory=TurnStore)
    num_numbered: int = 0
    free_numbers: list[int] = field(default_factory=list)
    """Numbers of turns that were given back, a heap."""
    num_reserved: int = 0
    """Tokens that answers under way may still take."""
    num_answered: int = 0
    used_up: str | None = None
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    @property
    def num_admitted(self) -> int:
        return self.num_numbered - len(self.free_numbers)

    def number(self) -> int:
        """Take the lowest number of a turn that is free."""
        if self.free_numbers:
            return heapq.heappop(self.free_numbers)
        self.num_numbered += 1
        return self.num_numbered - 1

    def wake(self) -> None:
        """Let requests that wait for tokens look again."""
        for loop, changed in self.waiting:
            with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
                loop.call_soon_threadsafe(changed.set)
        self.waiting.clear()

    def use_up(self, budget: str, limit: int) -> ApiError:
        self.used_up = budget
        message = f"the trajectory's budget of {limit} {budget} is used up; it ends here"
        return ApiError(403, message, code="budget_exhausted")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Permission to answer one request: the seed of each of its prompts, and the tokens of each answer. What was
    reserved for it is held until `RequestRecorder.release`."""

    seeds: tuple[int | None, ...]
    max_tokens: int | None
    num_reserved: int = field(repr=False)
    numbers: tuple[int, ...] = field(repr=False)
    session: _Session = field(repr=False, compare=False)


class RequestRecorder:
    """The turns of each session, until they are taken.

    A request counts when it was answered in full. A repeat of a request whose answer was not used (a client that lost
    it asks again) takes the place of the earlier one.

    Args:
        max_bytes: memory of all sessions together (`turn_store.py`); beyond it the sessions that were silent longest
            are dropped, with a warning.
        begun_only: refuse requests of sessions that `begin` was not called for, or that were taken.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, begun_only: bool = False):
        self._max_bytes = max_bytes
        self._begun_only = begun_only
        self.num_bytes = 0
        """Memory of all turns, about."""
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # The endpoint records in its event loop, the trainer takes from another thread.
        self._lock = threading.Lock()
        self.num_dropped_sessions = 0

    def begin(self, session: str | int, rules: SessionRules) -> None:
        """Open a session under rules."""
        with self._lock:
            self._close(str(session))
            self._sessions[str(session)] = _Session(rules)

    def rules(self, session: str | int) -> SessionRules:
        """Return the rules of a session. Raises ApiError (403) if it is not (or no longer) open."""
        with self._lock:
            return self._opened(str(session)).rules

    async def admit(
        self, session: str | int, *, num_prompts: int = 1, num_choices: int = 1, most: int | None = None
    ) -> Admission:
        """Count a request of a session, and reserve its tokens. While answers under way hold tokens that it needs, it
        waits for their ends: most take less than they may.

        Args:
            num_prompts: of the request, each of which is a turn.
            num_choices: answers to each.
            most: tokens that each answer may have; None: what the session has.

        Raises:
            ApiError: the session's budget is used up, or it is not (or no longer) open. Status 403, which clients do
                not send again.
        """
        while True:
            changed = asyncio.Event()
            with self._lock:
                opened = self._opened(str(session))
                admission = _admission(opened, num_prompts, num_choices, most)
                # Noted under the lock under which it was refused: no end of another request is missed between.
                if admission is None:
                    opened.waiting.append((asyncio.get_running_loop(), changed))
            if admission is not None:
                return admission
            await changed.wait()

    def release(self, admission: Admission, *, uses_turns: bool = True) -> None:
        """Give back the tokens that were reserved for a request that has ended; its answers were recorded before.

        Args:
            uses_turns: False if nothing was generated for it: its turns are given back too.
        """
        with self._lock:
            session = admission.session
            session.num_reserved -= admission.num_reserved
            if not uses_turns:
                for number in admission.numbers:
                    heapq.heappush(session.free_numbers, number)
            session.wake()

    def context_is_full(self, session: str | int) -> None:
        """Note that a prompt of a session left no room for an answer."""
        with self._lock:
            if (opened := self._sessions.get(str(session))) is not None:
                opened.used_up = "context"

    def record(self, session: str | int, turns: Sequence[RecordedTurn]) -> None:
        """Take the choices of one request. Dropped if the session was taken meanwhile and must be begun."""
        with self._lock:
            if self._begun_only and str(session) not in self._sessions:
                return
            opened = self._sessions.setdefault(str(session), _Session())
            self.num_bytes += opened.store.add(turns)
            if opened.used_up == "context":  # the agent shortened its conversation, and goes on
                opened.used_up = None
            opened.num_answered += len({id(turn.prompt_ids) for turn in turns})  # choices share the list
            self._sessions.move_to_end(str(session))
            while self.num_bytes > self._max_bytes and (name := self._oldest_but(str(session))) is not None:
                self._close(name)
                self.num_dropped_sessions += 1
                logger.warning(
                    f"the recorder holds more than {self._max_bytes} bytes that nobody took: dropped session {name!r}"
                )

    def _opened(self, session: str) -> _Session:
        if (opened := self._sessions.get(session)) is not None:
            return opened
        if self._begun_only:
            raise ApiError(403, f"the session {session!r} is not open: its trajectory has ended", code="ended")
        return self._sessions.setdefault(session, _Session())

    def _close(self, session: str) -> _Session | None:
        """Forget a session; requests of it that wait look again."""
        if (closed := self._sessions.pop(session, None)) is not None:
            self.num_bytes -= closed.store.num_bytes
            closed.wake()
        return closed

    def _oldest_but(self, written: str) -> str | None:
        """Return the session to drop: the one being written stays even if it is too long by itself, and those that have
        begun and wait for their first turn take no memory."""
        return next((name for name, opened in self._sessions.items() if len(opened.store) and name != written), None)

    def sessions(self) -> list[str]:
        """The sessions that have turns, the one that was silent longest first."""
        with self._lock:
            return [name for name, opened in self._sessions.items() if len(opened.store)]

    def take(self, session: str | int) -> list[RecordedTurn]:
        """A session's turns, which are forgotten here: repeats left out, and a turn that goes on from another one (its
        prompt begins with that one's prompt and answer) right behind it. Empty for a session that is not known."""
        return in_chains(without_repeats(self.take_record(session).turns))

    def take_record(self, session: str | int) -> SessionRecord:
        """A session's traffic as it came, which is forgotten here. Empty for a session that is not known."""
        with self._lock:
            taken = self._close(str(session))
        if taken is None:
            return SessionRecord()
        # Outside of the lock: a long session must not hold up requests.
        return SessionRecord(taken.rules, taken.store.turns(), taken.num_admitted, taken.num_answered, taken.used_up)


def _admission(session: _Session, num_prompts: int, num_choices: int, most: int | None) -> Admission | None:
    """Admit a request. Returns: None while others hold tokens that it needs. Raises ApiError: a budget is used up."""
    rules, num_answers = session.rules, num_prompts * num_choices
    if rules.max_turns is not None and session.num_admitted + num_prompts > rules.max_turns:
        raise session.use_up("turns", rules.max_turns)
    wanted = min((limit for limit in (most, rules.max_tokens_per_turn) if limit is not None), default=None)
    if rules.max_tokens is not None:
        left = (rules.max_tokens - session.store.num_generated - session.num_reserved) // num_answers
        if session.num_reserved and left < (rules.max_tokens if wanted is None else wanted):
            return None
        if left < 1:
            raise session.use_up("tokens", rules.max_tokens)
        wanted = left if wanted is None else min(left, wanted)
    num_reserved = 0 if rules.max_tokens is None or wanted is None else wanted * num_answers
    session.num_reserved += num_reserved
    numbers = tuple(session.number() for _ in range(num_prompts))
    seed_of = rules.seed_of_turn
    return Admission(
        seeds=tuple(None if seed_of is None else seed_of(number) for number in numbers),
        max_tokens=wanted,
        num_reserved=num_reserved,
        numbers=numbers,
        session=session,
    )


def without_repeats(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """The turns but for those that were asked for again, in an equal request that began after they had ended, and that
    no other turn goes on from."""
    kept = []
    for turn in turns:
        repeated = any(other.request == turn.request and other.started >= turn.finished for other in turns)
        if not repeated or any(goes_on_from(other, turn) for other in turns):
            kept.append(turn)
    return kept


def in_chains(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """The turns ordered so that each stands right behind the one it goes on from; chains in the order of their first
    turns. Of several that go on from the same turn the first stands behind it, the others begin chains."""
    chains: list[list[RecordedTurn]] = []
    for turn in sorted(turns, key=lambda turn: turn.started):
        before = [chain for chain in chains if goes_on_from(turn, chain[-1])]
        if before:
            max(before, key=lambda chain: chain[-1].num_tokens).append(turn)
        else:
            chains.append([turn])
    return [turn for chain in chains for turn in chain]


def goes_on_from(later: RecordedTurn, earlier: RecordedTurn) -> bool:
    """The later prompt begins with the earlier one and its answer."""
    middle, end = len(earlier.prompt_ids), earlier.num_tokens
    prompt = later.prompt_ids
    # The last token is compared first: most pairs differ there, and the whole comparison is linear in the prompt.
    last = (earlier.response_ids or earlier.prompt_ids)[-1]  # an answer may be empty, a prompt may not
    if len(prompt) < end or prompt[end - 1] != last:
        return False
    return bool(
        np.array_equal(prompt[middle:end], earlier.response_ids) and np.array_equal(prompt[:middle], earlier.prompt_ids)
    )
