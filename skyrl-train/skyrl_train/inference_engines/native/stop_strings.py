"""Search for stop strings in text that arrives one token at a time, across token boundaries."""

from collections.abc import Callable

Decode = Callable[[list[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Number of context tokens decoded before the new ones: decoders treat a token differently at the start of a text
(dropped space).
"""


class StopStringFinder:
    """Finder of the token that completes a stop string. Decodes a few tokens at a time, not the whole text.

    A token that leaves a character incomplete (byte-level tokens) is decoded again with the next one.
    """

    def __init__(self, stop: tuple[str, ...], decode: Decode):
        self._stop = stop
        self._decode = decode
        self._tail_length = max(map(len, stop)) - 1
        self._tail = ""
        self._tokens: list[int] = []
        self._num_read = 0

    def push(self, token: int) -> bool:
        """Add the next token of the completion. Returns whether its text completes a stop string."""
        self._tokens.append(token)
        known = self._decode(self._tokens[: self._num_read])
        text = self._decode(self._tokens)
        if text.endswith(_INCOMPLETE):
            return False
        window = self._tail + text[len(known) :]
        self._tokens = self._tokens[-_CONTEXT:]
        self._num_read = len(self._tokens)
        self._tail = window[-self._tail_length :] if self._tail_length else ""
        return any(stop in window for stop in self._stop)
