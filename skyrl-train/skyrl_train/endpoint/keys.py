"""Keys and base URLs that identify a session, for agents that accept no other parameter."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_train.endpoint.errors import ApiError

_PREFIX = "sk-skyrl."
_SESSION_OF_URL = "skyrl_session"


class EndpointKeys:
    """The server's key, and one for each session. A session's key is derived from the server's key and the session
    name, so every process with the server's key can compute it and nothing is stored.

    Args:
        api_key: the server's; None: requests without a key are accepted, and session keys are derived from a secret of
            this process.
    """

    def __init__(self, api_key: str | None):
        self._api_key = api_key
        self._secret = (api_key or secrets.token_urlsafe(32)).encode()

    def of_session(self, session: str) -> str:
        """Return the key of a session."""
        return f"{_PREFIX}{_decode_text(session.encode())}.{self._compute_signature(session)}"

    def find_session(self, given: Sequence[str]) -> str | None:
        """Return the session that the given keys belong to; None: the request is permitted but has no session.

        Raises:
            ApiError: a key is required and none is valid, or the keys belong to two sessions.
        """
        sessions = sorted({session for key in given if (session := self._parse_session(key)) is not None})
        if len(sessions) > 1:
            raise ApiError(
                403, f"the request has the keys of two sessions, {sessions[0]!r} and {sessions[1]!r}; send one of them"
            )
        if sessions:  # also next to the server's key: each header may hold one
            return sessions[0]
        if self._api_key is None and not any(key.startswith(_PREFIX) for key in given):
            return None
        if self._api_key is not None and any(self._is_servers(key) for key in given):
            return None
        raise ApiError(
            401,
            "the key is neither the server's nor a session's; send it as `Authorization: Bearer KEY` or as "
            "`x-api-key: KEY`",
            code="invalid_api_key",
        )

    def _is_servers(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._secret)

    def _parse_session(self, key: str) -> str | None:
        name, _, signature = key.removeprefix(_PREFIX).partition(".")
        if not key.startswith(_PREFIX):
            return None
        try:
            session = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:
            return None
        return session if hmac.compare_digest(signature.encode(), self._compute_signature(session).encode()) else None

    def _compute_signature(self, session: str) -> str:
        return _decode_text(hmac.digest(self._secret, session.encode(), hashlib.sha256))


def _decode_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class SessionUrls:
    """ASGI middleware that also serves all routes under `/s/SESSION` and stores the session in the request's scope."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"].startswith(b"/s/"):
            # The raw path: a session's name may have quoted slashes.
            name, _, rest = scope["raw_path"].removeprefix(b"/s/").partition(b"/")
            rest = b"/" + rest
            if name:  # without a session it is no known route
                scope = {**scope, _SESSION_OF_URL: unquote(name), "path": unquote(rest), "raw_path": rest}
        await self._app(scope, receive, send)


def build_session_path(session: str) -> str:
    """Return the URL path prefix of a session."""
    return f"/s/{quote(session, safe='')}"


def parse_session_from_url(scope: Scope) -> str | None:
    """Return the session named in a request's URL."""
    return scope.get(_SESSION_OF_URL) or None
