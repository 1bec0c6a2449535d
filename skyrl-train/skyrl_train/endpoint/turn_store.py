"""Compact storage of the turns of recorded sessions: arrays instead of lists, shared prefixes stored once."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_train.types import ConversationType, MessageType

BLOCK = 256
"""Tokens per prompt block. Prompts with a common prefix share its full blocks."""

_BYTES_OF_TURN, _BYTES_OF_OBJECT = 1200, 150
"""Measured overhead in bytes of a turn, and of a block or message."""


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """One response to one request. The three lists have one entry per generated token."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    stop_reason: str
    temperature: float
    """Temperature of the log-probs."""
    messages: ConversationType | None
    """Messages of the prompt; None for requests with a text or tokens."""
    answer: MessageType | None
    """Assistant message returned to the agent."""
    request: str
    """Equal for equal requests."""
    started: float
    finished: float
    """Start and end in seconds of one clock."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class _StoredTurn:
    """Turn stored as arrays: the prompt as int32 in blocks of bytes, and arrays of the response."""

    rest: RecordedTurn
    prompt: tuple[bytes, ...]
    response: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray

    def build_turn(self) -> RecordedTurn:
        return replace(
            self.rest,
            prompt_ids=np.frombuffer(b"".join(self.prompt), np.int32).tolist(),
            response_ids=self.response.tolist(),
            log_probs=self.log_probs.tolist(),
            weight_versions=self.versions.tolist(),
        )


class TurnStore:
    """Turns of one session, ordered by completion time."""

    def __init__(self) -> None:
        self._turns: list[_StoredTurn] = []
        self._blocks: dict[bytes, bytes] = {}
        self._messages: dict[tuple[object, object], MessageType] = {}
        self.num_bytes = 0
        """Approximate memory of the turns."""
        self.num_generated = 0
        """Number of response tokens."""

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turns: Sequence[RecordedTurn]) -> int:
        """Store the choices of one request. Returns their size in bytes."""
        before = self.num_bytes
        prompts: dict[int, tuple[bytes, ...]] = {}  # choices share the list
        for turn in turns:
            if id(turn.prompt_ids) not in prompts:
                prompts[id(turn.prompt_ids)] = self._share_blocks(turn.prompt_ids)
            messages = None if turn.messages is None else [self._find_shared_message(each) for each in turn.messages]
            answer = None if turn.answer is None else self._find_shared_message(turn.answer)
            stored = _StoredTurn(
                replace(
                    turn,
                    prompt_ids=[],
                    response_ids=[],
                    log_probs=[],
                    weight_versions=[],
                    messages=messages,
                    answer=answer,
                ),
                prompts[id(turn.prompt_ids)],
                np.asarray(turn.response_ids, np.int32),
                _to_exact_floats(turn.log_probs),
                _to_versions(turn.weight_versions),
            )
            self._turns.append(stored)
            self.num_generated += len(turn.response_ids)
            self.num_bytes += _BYTES_OF_TURN + stored.response.nbytes + stored.log_probs.nbytes
            self.num_bytes += 8 * (len(stored.prompt) + len(messages or ()))
            self.num_bytes += stored.versions.nbytes if stored.versions.flags.owndata else 0
        return self.num_bytes - before

    def list_turns(self) -> list[RecordedTurn]:
        return [turn.build_turn() for turn in self._turns]

    def _share_blocks(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        raw, size = np.asarray(ids, np.int32).tobytes(), 4 * BLOCK
        blocks = []
        for start in range(0, len(raw), size):
            block = raw[start : start + size]
            if block not in self._blocks:
                self._blocks[block] = block
                self.num_bytes += len(block) + _BYTES_OF_OBJECT
            blocks.append(self._blocks[block])
        return tuple(blocks)

    def _find_shared_message(self, message: MessageType) -> MessageType:
        """Return an equal message of an earlier turn, if any."""
        content = message.get("content")
        key = message.get("role"), content if isinstance(content, str) else None
        known = self._messages.get(key)
        if known is not None and known == message:
            return known
        self._messages[key] = message
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        # CPython stores a text in 1, 2 or 4 bytes a character, as its widest one needs.
        self.num_bytes += 2 * _BYTES_OF_OBJECT + sys.getsizeof(content if isinstance(content, str) else repr(content))
        self.num_bytes += 2 * sys.getsizeof(repr(others)) if others else 0
        return message


def _to_exact_floats(values: Sequence[float]) -> np.ndarray:
    """Convert to float32 (engine precision), or float64 if that would change a value."""
    doubles = np.asarray(values, np.float64)
    singles = doubles.astype(np.float32)
    return singles if bool((singles == doubles).all()) else doubles


def _to_versions(values: Sequence[int]) -> np.ndarray:
    """Convert to int64; a constant array, as in most responses, is stored as one value."""
    if values and values.count(values[0]) == len(values):
        return np.broadcast_to(np.int64(values[0]), len(values))
    return np.asarray(values, np.int64)
