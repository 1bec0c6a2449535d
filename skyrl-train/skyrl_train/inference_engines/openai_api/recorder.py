"""Recorder of the requests of agents and their responses, as tokens, so that a run can train on an agent that does not
know about training. Knows sessions, their turns and their budgets; `generators/recorded.py` turns them into training
samples.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from loguru import logger

from skyrl_train.inference_engines.openai_api.errors import ApiError
from skyrl_train.types import ConversationType, MessageType


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """One answer to one request. The three lists are one entry a written token."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    stop_reason: str
    temperature: float
    """The log-probs are those of this temperature."""
    messages: ConversationType | None
    """Messages of the prompt; None for requests that gave a text or tokens."""
    answer: MessageType | None
    """The assistant message that the agent was given."""
    request: str
    """Equal for equal requests."""
    started: float
    finished: float
    """Seconds of one clock."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


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


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Permission to answer one request: how its answer is drawn, and of how many tokens."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = None

    def keywords(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling keywords of an answer, of those that a request asks for."""
        return {name: value for name, value in asked.items() if name not in self.ignored} | dict(self.sampling)

    def budget(self, asked: int | None, room: int) -> int | None:
        """Return the tokens of an answer, of the number that a request asks for and the context has room for. Without a
        limit here it is the request's, which may be too much."""
        if self.max_tokens is None:
            return asked
        return min(room, self.max_tokens, asked or room)


@dataclass
class SessionRecord:
    """Traffic of one session."""

    rules: SessionRules = field(default_factory=SessionRules)
    turns: list[RecordedTurn] = field(default_factory=list)
    num_admitted: int = 0
    """Requests that an answer was generated for, of those under way too."""
    num_answered: int = 0
    """Requests whose answer was complete."""
    used_up: str | None = None
    """Budget that refused a request: `turns`, `tokens`, or `context` if no request was answered after it."""

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_generated(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)


class RequestRecorder:
    """The turns of each session, until they are taken.

    A request counts when it was answered in full. A repeat of a request whose answer was not used (a client that lost
    it asks again) takes the place of the earlier one.

    Args:
        max_tokens: of all sessions together, prompts included; beyond it the sessions that were silent longest are
            dropped, with a warning.
        begun_only: refuse requests of sessions that `begin` was not called for, or that were taken.
    """

    def __init__(self, max_tokens: int = 256_000_000, *, begun_only: bool = False):
        self._max_tokens = max_tokens
        self._begun_only = begun_only
        self._num_tokens = 0
        self._sessions: OrderedDict[str, SessionRecord] = OrderedDict()
        # The endpoint records in its event loop, the trainer takes from another thread.
        self._lock = threading.Lock()
        self.num_dropped_sessions = 0

    def begin(self, session: str | int, rules: SessionRules) -> None:
        """Open a session under rules."""
        with self._lock:
            self._sessions[str(session)] = SessionRecord(rules)

    def admit(self, session: str | int, num_choices: int = 1) -> Admission:
        """Count a request of a session.

        Args:
            num_choices: answers to it, which share the tokens that are left.

        Raises:
            ApiError: the session's budget is used up, or it is not (or no longer) open. Status 403, which clients do
                not send again.
        """
        with self._lock:
            record = self._sessions.get(str(session))
            if record is None:
                if self._begun_only:
                    raise ApiError(403, f"the session {session!r} is not open: its trajectory has ended", code="ended")
                record = self._sessions.setdefault(str(session), SessionRecord())
            rules, left = record.rules, None
            if rules.max_turns is not None and record.num_admitted >= rules.max_turns:
                raise _used_up(record, "turns", rules.max_turns)
            if rules.max_tokens is not None and (left := (rules.max_tokens - record.num_generated) // num_choices) < 1:
                raise _used_up(record, "tokens", rules.max_tokens)
            turn, record.num_admitted = record.num_admitted, record.num_admitted + 1
        return Admission(
            sampling=rules.sampling,
            ignored=rules.ignored,
            seed=None if rules.seed_of_turn is None else rules.seed_of_turn(turn),
            max_tokens=min((limit for limit in (left, rules.max_tokens_per_turn) if limit is not None), default=None),
        )

    def context_is_full(self, session: str | int) -> None:
        """Note that a prompt of a session left no room for an answer."""
        with self._lock:
            if (record := self._sessions.get(str(session))) is not None:
                record.used_up = "context"

    def record(self, session: str | int, turns: Sequence[RecordedTurn]) -> None:
        """Take the choices of one request. Dropped if the session was taken meanwhile and must be begun."""
        with self._lock:
            if self._begun_only and str(session) not in self._sessions:
                return
            record = self._sessions.setdefault(str(session), SessionRecord())
            record.turns.extend(turns)
            if record.used_up == "context":  # the agent shortened its conversation, and goes on
                record.used_up = None
            record.num_answered += len({id(turn.prompt_ids) for turn in turns})  # choices share the list
            self._sessions.move_to_end(str(session))
            self._num_tokens += sum(turn.num_tokens for turn in turns)
            while self._num_tokens > self._max_tokens and (name := self._oldest_but(str(session))) is not None:
                self._num_tokens -= self._sessions.pop(name).num_tokens
                self.num_dropped_sessions += 1
                logger.warning(
                    f"the recorder holds more than {self._max_tokens} tokens that nobody took: dropped session {name!r}"
                )

    def _oldest_but(self, written: str) -> str | None:
        """Return the session to drop: the one being written stays even if it is too long by itself, and those that have
        begun and wait for their first turn take no memory."""
        return next((name for name, record in self._sessions.items() if record.turns and name != written), None)

    def sessions(self) -> list[str]:
        """The sessions that have turns, the one that was silent longest first."""
        with self._lock:
            return [name for name, record in self._sessions.items() if record.turns]

    def take(self, session: str | int) -> list[RecordedTurn]:
        """A session's turns, which are forgotten here: repeats left out, and a turn that goes on from another one (its
        prompt begins with that one's prompt and answer) right behind it. Empty for a session that is not known."""
        # Outside of the lock: sorting a long session must not hold up requests.
        return in_chains(without_repeats(self.take_record(session).turns))

    def take_record(self, session: str | int) -> SessionRecord:
        """A session's traffic as it came, which is forgotten here. Empty for a session that is not known."""
        with self._lock:
            taken = self._sessions.pop(str(session), SessionRecord())
            self._num_tokens -= taken.num_tokens
        return taken


def _used_up(record: SessionRecord, budget: str, limit: int) -> ApiError:
    record.used_up = budget
    return ApiError(
        403, f"the trajectory's budget of {limit} {budget} is used up; it ends here", code="budget_exhausted"
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
    if len(prompt) < end or prompt[end - 1] != earlier.response_ids[-1]:
        return False
    return bool(
        np.array_equal(prompt[middle:end], earlier.response_ids) and np.array_equal(prompt[:middle], earlier.prompt_ids)
    )
