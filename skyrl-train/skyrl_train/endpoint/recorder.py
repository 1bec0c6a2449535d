"""Recorder of agents' requests and responses as tokens, so that a run can train on an unmodified agent. Handles
sessions, their turns and budgets; `generators/recorded.py` turns them into training samples.
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
"""Memory limit of turns that are not taken."""


@dataclass(frozen=True, kw_only=True)
class SessionRules:
    """Budget of a session, and sampling settings that override its requests. None: no limit."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling keywords that override the request."""
    ignored: Sequence[str] = ()
    """Sampling keywords of requests that are ignored."""
    seed_of_turn: Callable[[int], int] | None = None
    """Seed by request number, from 0; None: the request's own seed."""
    max_turns: int | None = None
    """Maximum number of requests."""
    max_tokens: int | None = None
    """Maximum number of generated tokens in total."""
    max_tokens_per_turn: int | None = None
    """Maximum number of generated tokens per request."""

    def build_keywords(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Build the sampling keywords of a completion from the requested ones."""
        return {name: value for name, value in asked.items() if name not in self.ignored} | dict(self.sampling)


@dataclass
class SessionRecord:
    """Recorded traffic of one session."""

    rules: SessionRules = field(default_factory=SessionRules)
    turns: list[RecordedTurn] = field(default_factory=list)
    num_admitted: int = 0
    """Number of requests with generated tokens, including requests in flight."""
    num_answered: int = 0
    """Number of requests with a complete response."""
    used_up: str | None = None
    """Budget that rejected a request: `turns`, `tokens`, or `context` if no request was completed after it."""

    @property
    def num_generated(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(eq=False)
class _Session:
    """State of an open session."""

    rules: SessionRules = field(default_factory=SessionRules)
    store: TurnStore = field(default_factory=TurnStore)
    num_numbered: int = 0
    free_numbers: list[int] = field(default_factory=list)
    """Heap of returned turn numbers."""
    num_reserved: int = 0
    """Tokens reserved by completions in flight."""
    num_answered: int = 0
    used_up: str | None = None
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    @property
    def num_admitted(self) -> int:
        return self.num_numbered - len(self.free_numbers)

    def get_free_turn_number(self) -> int:
        """Return the lowest free turn number."""
        if self.free_numbers:
            return heapq.heappop(self.free_numbers)
        self.num_numbered += 1
        return self.num_numbered - 1

    def wake(self) -> None:
        """Wake requests that wait for tokens."""
        for loop, changed in self.waiting:
            with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
                loop.call_soon_threadsafe(changed.set)
        self.waiting.clear()

    def use_up(self, budget: str, limit: int) -> ApiError:
        self.used_up = budget
        message = f"the trajectory's budget of {limit} {budget} is exhausted; it ends here"
        return ApiError(403, message, code="budget_exhausted")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Admission of one request: a seed for each prompt and a token limit for each completion. The reservation is held
    until `RequestRecorder.release`.
    """

    seeds: tuple[int | None, ...]
    max_tokens: int | None
    num_reserved: int = field(repr=False)
    numbers: tuple[int, ...] = field(repr=False)
    session: _Session = field(repr=False, compare=False)


class RequestRecorder:
    """Recorder of the turns of each session until they are taken.

    A request is recorded when its response is complete. A repeated request replaces the earlier one if that response
    was not used (a client retries after losing it).

    Args:
        max_bytes: memory limit of all sessions (`turn_store.py`); beyond it the least recently used sessions are
            evicted with a warning.
        begun_only: reject requests of sessions that were not opened by `begin`, or were taken.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, *, begun_only: bool = False):
        self._max_bytes = max_bytes
        self._begun_only = begun_only
        self.num_bytes = 0
        """Approximate memory of all turns."""
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # The endpoint records in its event loop; the trainer takes turns from another thread.
        self._lock = threading.Lock()
        self.num_dropped_sessions = 0

    def begin(self, session: str | int, rules: SessionRules) -> None:
        """Open a session under rules."""
        with self._lock:
            self._close(str(session))
            self._sessions[str(session)] = _Session(rules)

    def rules(self, session: str | int) -> SessionRules:
        """Return the rules of a session. Raises ApiError (403) if it is not open."""
        with self._lock:
            return self._get_open_session(str(session)).rules

    async def admit(
        self, session: str | int, *, num_prompts: int = 1, num_choices: int = 1, most: int | None = None
    ) -> Admission:
        """Count a request of a session, and reserve its tokens. Waits while completions in flight reserve the tokens it
        needs, since most use less than reserved.

        Args:
            num_prompts: prompts of the request; each is a turn.
            num_choices: completions per prompt.
            most: token limit of each completion; None: the session's remaining tokens.

        Raises:
            ApiError: the session's budget is used up, or it is not open. Status 403, which clients do not retry.
        """
        while True:
            changed = asyncio.Event()
            with self._lock:
                opened = self._get_open_session(str(session))
                admission = _try_admit(opened, num_prompts, num_choices, most)
                # Registered under the lock that rejected it, so that no release in between is missed.
                if admission is None:
                    opened.waiting.append((asyncio.get_running_loop(), changed))
            if admission is not None:
                return admission
            await changed.wait()

    def release(self, admission: Admission, *, uses_turns: bool = True) -> None:
        """Release the tokens reserved by a finished request, after its choices were recorded.

        Args:
            uses_turns: False if nothing was generated: its turns are returned too.
        """
        with self._lock:
            session = admission.session
            session.num_reserved -= admission.num_reserved
            if not uses_turns:
                for number in admission.numbers:
                    heapq.heappush(session.free_numbers, number)
            session.wake()

    def record_full_context(self, session: str | int) -> None:
        """Record that a prompt of a session left no room for a response."""
        with self._lock:
            if (opened := self._sessions.get(str(session))) is not None:
                opened.used_up = "context"

    def record(self, session: str | int, turns: Sequence[RecordedTurn]) -> None:
        """Record the choices of one request. They are dropped if the session was taken meanwhile and `begun_only` is
        set.
        """
        with self._lock:
            if self._begun_only and str(session) not in self._sessions:
                return
            opened = self._sessions.setdefault(str(session), _Session())
            self.num_bytes += opened.store.add(turns)
            if opened.used_up == "context":  # the agent shortened its conversation and continues
                opened.used_up = None
            opened.num_answered += len({id(turn.prompt_ids) for turn in turns})  # choices share the list
            self._sessions.move_to_end(str(session))
            while self.num_bytes > self._max_bytes and (name := self._find_oldest_except(str(session))) is not None:
                self._close(name)
                self.num_dropped_sessions += 1
                logger.warning(
                    f"the recorder holds more than {self._max_bytes} bytes of uncollected samples: "
                    f"evicted session {name!r}"
                )

    def _get_open_session(self, session: str) -> _Session:
        if (opened := self._sessions.get(session)) is not None:
            return opened
        if self._begun_only:
            raise ApiError(403, f"session {session!r} is closed: its trajectory has ended", code="ended")
        return self._sessions.setdefault(session, _Session())

    def _close(self, session: str) -> _Session | None:
        """Remove a session and wake its waiting requests."""
        if (closed := self._sessions.pop(session, None)) is not None:
            self.num_bytes -= closed.store.num_bytes
            closed.wake()
        return closed

    def _find_oldest_except(self, written: str) -> str | None:
        """Return the session to evict. The one being written stays even if it exceeds the limit alone; sessions without
        turns use no memory.
        """
        return next((name for name, opened in self._sessions.items() if len(opened.store) and name != written), None)

    def list_sessions(self) -> list[str]:
        """List the sessions with turns, least recently used first."""
        with self._lock:
            return [name for name, opened in self._sessions.items() if len(opened.store)]

    def take(self, session: str | int) -> list[RecordedTurn]:
        """Remove and return a session's turns, without repeats. A turn that continues another (its prompt begins with
        the other's prompt and response) follows it directly. Empty for an unknown session.
        """
        return order_in_chains(remove_repeats(self.take_record(session).turns))

    def take_record(self, session: str | int) -> SessionRecord:
        """Remove and return a session's traffic in order of completion. Empty for an unknown session."""
        with self._lock:
            taken = self._close(str(session))
        if taken is None:
            return SessionRecord()
        # Outside of the lock: a long session must not block requests.
        return SessionRecord(
            taken.rules, taken.store.list_turns(), taken.num_admitted, taken.num_answered, taken.used_up
        )


def _try_admit(session: _Session, num_prompts: int, num_choices: int, most: int | None) -> Admission | None:
    """Admit a request; None while others reserve tokens it needs. Raises ApiError if a budget is used up."""
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
    numbers = tuple(session.get_free_turn_number() for _ in range(num_prompts))
    seed_of = rules.seed_of_turn
    return Admission(
        seeds=tuple(None if seed_of is None else seed_of(number) for number in numbers),
        max_tokens=wanted,
        num_reserved=num_reserved,
        numbers=numbers,
        session=session,
    )


def remove_repeats(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """Remove turns that no other turn continues and that an equal request repeated after they had ended."""
    kept = []
    for turn in turns:
        repeated = any(other.request == turn.request and other.started >= turn.finished for other in turns)
        if not repeated or any(is_continuation(other, turn) for other in turns):
            kept.append(turn)
    return kept


def order_in_chains(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """Order turns so that each directly follows the turn it continues, and chains by their first turns. Of several
    continuations of one turn the first follows it, the others start new chains.
    """
    chains: list[list[RecordedTurn]] = []
    for turn in sorted(turns, key=lambda turn: turn.started):
        before = [chain for chain in chains if is_continuation(turn, chain[-1])]
        if before:
            max(before, key=lambda chain: chain[-1].num_tokens).append(turn)
        else:
            chains.append([turn])
    return [turn for chain in chains for turn in chain]


def is_continuation(later: RecordedTurn, earlier: RecordedTurn) -> bool:
    """Return whether the later prompt begins with the earlier prompt and response."""
    middle, end = len(earlier.prompt_ids), earlier.num_tokens
    prompt = later.prompt_ids
    # The last token is compared first: most pairs differ there, and the whole comparison is linear in the prompt.
    last = (earlier.response_ids or earlier.prompt_ids)[-1]  # a response may be empty, a prompt may not
    if len(prompt) < end or prompt[end - 1] != last:
        return False
    return bool(
        np.array_equal(prompt[middle:end], earlier.response_ids) and np.array_equal(prompt[:middle], earlier.prompt_ids)
    )
