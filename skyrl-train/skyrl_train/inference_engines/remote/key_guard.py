"""ASGI middleware for rollout servers that requires the shared key on every request.

vLLM's own `--api-key` leaves its control routes open (`/collective_rpc`, `/sleep`, `/pause`, …), which call any method
of the workers. Servers load this class with `--middleware`; `skyrl_train.entrypoints.serve_vllm` does so for vLLM.
"""

import hmac
import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.env_vars import ENGINE_API_KEY, engine_api_key
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

GUARD = f"{__name__}.KeyGuard"
_OPEN_TO_ALL = ("/health", "/ping")
"""Routes without a key: health checks of process supervisors, which disclose nothing else."""
_NO_KEY = (
    f"this server was started without a key ({ENGINE_API_KEY}, or --api-key-file), so it accepts only "
    "requests from its own machine"
)
_WRONG_KEY = "the key is wrong; send the server's key as `Authorization: Bearer KEY`"


class KeyGuard:
    """Middleware that requires the key in the environment variable; without it, only local clients are admitted."""

    def __init__(self, app: "ASGIApp"):
        self.app = app
        key = engine_api_key()
        self._expected = None if key is None else key.encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN_TO_ALL or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _build_refusal(send, _NO_KEY if self._expected is None else _WRONG_KEY)

    def _is_authorized(self, scope: "Scope") -> bool:
        if self._expected is None:
            return scope.get("client") is not None and is_loopback(scope["client"][0])
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._expected)


def is_loopback(host: str) -> bool:
    """Return whether an address or host name is loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_key_file(path: str, setting: str) -> str:
    """Read the key from the only line of a file.

    Args:
        setting: name of the setting with the path.

    Raises:
        ConfigError: no such file, or not exactly one line.
    """
    try:
        words = Path(path).expanduser().read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path} must be a file that contains a key: {type(error).__name__}") from None
    if len(words) != 1 or not words[0].isascii() or not words[0].isprintable():
        raise ConfigError(f"{setting}={path} must contain the key as one line of printable ASCII without spaces")
    return words[0]


async def _build_refusal(send: "Send", message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "authentication_error", "code": "invalid_api_key"}})
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
