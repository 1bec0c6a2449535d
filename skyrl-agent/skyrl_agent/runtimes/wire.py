"""Protocol between a runtime server and its clients. Bytes are base64 in JSON; files are sent as they are.

| | |
|---|---|
| `PUT /runtimes/{id}` | creates it (`NewRuntime`); `GET` waits for it up to `wait` seconds; both give `RuntimeState` |
| `POST /runtimes/{id}/lease` | heartbeat, as is any other request |
| `DELETE /runtimes/{id}` | closes it |
| `PUT /runtimes/{id}/commands/{id}` | runs a command (`NewCommand`); `GET` waits for it; both return `CommandState` |
| `DELETE /runtimes/{id}/commands/{id}` | ends it |
| `PUT`, `GET /runtimes/{id}/files?path=` | a file |
| `GET /runtimes/{id}/snapshot` | a compressed tar |
| `GET /health` | number of runtimes, and their limit |

Ids are the client's, so a request that is made twice does nothing twice. Errors are `ErrorReply`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from skyrl_agent.runtimes.base import ExecResult, Limits

POLL_SECONDS = 20.0
"""The longest that a request waits: below what proxies allow."""
ID = r"^[0-9a-zA-Z_-]{8,64}$"


class Body(BaseModel):
    """Base class of requests and replies."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class NewRuntime(Body):
    """Request to create a runtime; see `RuntimeSpec`."""

    image: str | None = None
    workdir: str | None = None
    files: dict[str, bytes] = {}
    setup: tuple[str, ...] = ()
    env: dict[str, str] = {}
    limits: Limits = Limits()
    lease_seconds: float = Field(default=60.0, gt=0)
    snapshot: bytes | None = None
    """A compressed tar."""


class RuntimeState(Body):
    """State of a runtime."""

    ready: bool
    workdir: str = ""
    python: str = ""


class NewCommand(Body):
    """Request to run a command; see `Runtime.exec`."""

    command: str | list[str]
    stdin: bytes = b""
    env: dict[str, str] = {}
    timeout: float | None = Field(default=None, gt=0)
    limits: Limits | None = None


class CommandState(Body):
    """State of a command."""

    result: ExecResult | None = None
    """None while it runs."""


ErrorKind = Literal["infrastructure", "value", "missing_file", "full", "gone", "unauthorized", "request"]


class ErrorReply(Body):
    """Reply to a request that failed."""

    kind: ErrorKind
    """`full`: no room for a runtime now. `gone`: there is none of that id. `value`, `missing_file`: what `Runtime`
    raises. `request`: not as described here."""
    message: str
