"""Limits of client connections: deadline for a complete request, and eviction of idle connections.

uvicorn itself has a time-out for the pause between two requests, which the next request's first byte ends.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
"""Longest time from a connection's start, or a request's first byte, to the end of its headers."""
REST_SECONDS = 120.0
"""Longest time for the rest of a body that was answered (with a refusal, mostly) before all of it had arrived."""
UNREAD_SECONDS = 60.0
"""An answer of which nothing is read for so long is given up."""
MAX_HEAD_BYTES = 64 * 1024
RESERVED_FILES = 256
"""File descriptors kept for the database, payloads and the engine."""


def compute_connection_limit(files: int) -> int:
    """Return the number of connections that an open file limit allows."""
    return max(files - RESERVED_FILES, files // 2)


class Connections:
    """Registry of open connections.

    Args:
        limit: beyond it, a new connection takes the place of the one that has been without a request for longest
    """

    def __init__(self, limit: int, *, head_seconds: float = HEAD_SECONDS, unread_seconds: float = UNREAD_SECONDS):
        self.limit, self.head_seconds, self.unread_seconds = limit, head_seconds, unread_seconds
        self._open: set[_Timed] = set()
        self._idle: dict[_Timed, None] = {}
        """Connections without a request under way, longest first."""
        self.num_cut = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def metrics(self) -> dict[str, float]:
        return {
            "connections": self.num_open,
            "connections_limit": self.limit,
            "connections_cut_total": self.num_cut,
        }

    def protocol(self) -> type[asyncio.Protocol]:
        """Return uvicorn's HTTP protocol, whose connections are registered here and cut at their deadlines."""
        return type("TimedConnection", (_Timed, AutoHTTPProtocol), {"registry": self})

    def opened(self, connection: "_Timed") -> None:
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self.limit:
            next(iter(self._idle)).abort()  # at least the new one is there

    def serving(self, connection: "_Timed") -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: "_Timed") -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: "_Timed") -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class _Timed(asyncio.Protocol):
    """uvicorn's protocol with a connection timer. A connection is *idle* until a request's headers are complete and
    again after the response; in between, the reader of the body enforces deadlines (`bodies`).
    """

    registry: Connections
    transport: Any
    loop: asyncio.AbstractEventLoop
    cycle: Any
    """Latest request and its answer, as uvicorn holds them."""
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(self.registry.head_seconds, self.abort)
        self.registry.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clocks()
        self.registry.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._late = _cancel_timer(self._late)
            self._head_bytes = 0
            self.registry.serving(self)
            return
        is_rest = self.cycle is not None and self.cycle.more_body
        if self._late is None:
            self._late = self.loop.call_later(REST_SECONDS if is_rest else self.registry.head_seconds, self.abort)
        if not is_rest:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # pyright: ignore[reportAttributeAccessIssue]
        if self.cycle.response_complete:  # else it begins with a request that came meanwhile
            self.registry.idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.registry.unread_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = _cancel_timer(self._unread)

    def abort(self) -> None:
        """End the connection at once."""
        self._stop_clocks()
        self.registry.closed(self)
        self.registry.num_cut += 1
        self.transport.abort()

    def _stop_clocks(self) -> None:
        self._late, self._unread = _cancel_timer(self._late), _cancel_timer(self._unread)


def _cancel_timer(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()
