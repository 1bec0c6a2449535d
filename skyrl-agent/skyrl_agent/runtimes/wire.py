"""What a client of a runtime server and the server say to each other. Bytes are base64 in JSON; files go as they are.

| | |
|---|---|
| `PUT /runtimes/{id}` | makes one (`NewRuntime`); `GET` waits up to `wait` seconds for it; both give `RuntimeState` |
| `POST /runtimes/{id}/lease` | a heartbeat; any other request is one too |
| `DELETE /runtimes/{id}` | closes it |
| `PUT /runtimes/{id}/commands/{id}` | runs one (`NewCommand`); `GET` waits for it; both give `CommandState` |
| `DELETE /runtimes/{id}/commands/{id}` | ends it |
| `PUT`, `GET /runtimes/{id}/files?path=` | a file |
| `GET /runtimes/{id}/snapshot` | a compressed tar |
| `GET /health` | how many runtimes there are, and may be |

Ids are the client's, so a request that is made twice does nothing twice. Errors are `Problem`s.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from skyrl_agent.runtimes.base import ExecResult, Limits

POLL_SECONDS = 20.0
"""The longest that a request waits: below what proxies allow."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
ID = r"^[0-9a-zA-Z_-]{8,64}$"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class NewRuntime(Body):
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
    ready: bool
    workdir: str = ""
    python: str = ""


class NewCommand(Body):
    command: str | list[str]
    stdin: bytes = b""
    env: dict[str, str] = {}
    timeout: float | None = Field(default=None, gt=0)
    limits: Limits | None = None


class CommandState(Body):
    result: ExecResult | None = None
    """None while it runs."""


ProblemKind = Literal["infrastructure", "value", "missing_file", "full", "gone", "unauthorized", "request"]


class Problem(Body):
    kind: ProblemKind
    """`full`: no room for a runtime now. `gone`: there is none of that id. `value`, `missing_file`: what `Runtime`
    raises. `request`: not as described here."""
    message: str
