"""Results of requests."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StoredResult:
    """Result of a finished request: either `body` or `error` is set."""

    request_id: str
    kind: str
    """`train` and `forward`: body is `ForwardBackwardOutput` in protobuf; `sample`: `SampleResponse` in protobuf;
    `create`, `optimize`, `save`, `load`, `unload`: JSON."""
    body: bytes | None
    error: str | None = None
    category: str | None = None
    """Category of the error: `user` or `server`."""

    @property
    def size_bytes(self) -> int:
        return len(self.body or b"") + len(self.error or "") + 200


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Request that is not finished yet."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
