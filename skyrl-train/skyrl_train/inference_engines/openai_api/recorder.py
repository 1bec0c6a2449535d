"""Recorder of the requests of agents and their responses, as tokens, so that a run can train on an agent that does not
know about training. Knows sessions and turns; `generators/recorded.py` turns them into training samples.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from loguru import logger

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


@dataclass
class _Session:
    turns: list[RecordedTurn] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)


class RequestRecorder:
    """The turns of each session, until they are taken.

    A request counts when it was answered in full. A repeat of a request whose answer was not used (a client that lost
    it asks again) takes the place of the earlier one.

    Args:
        max_tokens: of all sessions together, prompts included; beyond it the sessions that were silent longest are
            dropped, with a warning.
    """

    def __init__(self, max_tokens: int = 256_000_000):
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # The endpoint records in its event loop, the trainer takes from another thread.
        self._lock = threading.Lock()
        self.num_dropped_sessions = 0

    def record(self, session: str | int, turns: Sequence[RecordedTurn]) -> None:
        """Take the choices of one request."""
        with self._lock:
            self._sessions.setdefault(str(session), _Session()).turns.extend(turns)
            self._sessions.move_to_end(str(session))
            self._num_tokens += sum(turn.num_tokens for turn in turns)
            # The last session stays even if it is too long by itself: it is the one being written.
            while self._num_tokens > self._max_tokens and len(self._sessions) > 1:
                name, dropped = self._sessions.popitem(last=False)
                self._num_tokens -= dropped.num_tokens
                self.num_dropped_sessions += 1
                logger.warning(
                    f"the recorder holds more than {self._max_tokens} tokens that nobody took: dropped session {name!r}"
                )

    def sessions(self) -> list[str]:
        """The sessions that have turns, the one that was silent longest first."""
        with self._lock:
            return list(self._sessions)

    def take(self, session: str | int) -> list[RecordedTurn]:
        """A session's turns, which are forgotten here: repeats left out, and a turn that goes on from another one (its
        prompt begins with that one's prompt and answer) right behind it. Empty for a session that is not known."""
        with self._lock:
            taken = self._sessions.pop(str(session), _Session())
            self._num_tokens -= taken.num_tokens
        # After the lock: sorting a long session must not hold up requests.
        return in_chains(without_repeats(taken.turns))


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
