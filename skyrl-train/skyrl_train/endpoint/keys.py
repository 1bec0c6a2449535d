"""Keys and base URLs that name a session, for agents that can be given nothing else."""

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
    """The server's key, and one for each session. A session's key is made of the server's key and the session's name,
    so that it is known in every process that has the server's key, and costs no memory.

    Args:
        api_key: the server's; None: requests without a key are answered too, and sessions' keys are made of a secret
            of this process.
    """

    def __init__(self, api_key: str | None):
        self._api_key = api_key
        self._secret = (api_key or secrets.token_urlsafe(32)).encode()

    def of_session(self, session: str) -> str:
        """Return the key whose requests belong to a session."""
        return f"{_PREFIX}{_text_of(session.encode())}.{self._signature(session)}"

    def session_of(self, given: Sequence[str]) -> str | None:
        """Return the session whose key is among the given ones; None: they may ask, but belong to no session.

        Raises:
            ApiError: no key is one of this server's, and it asks for one; or they are of two sessions.
        """
        sessions = sorted({session for key in given if (session := self._session(key)) is not None})
        if len(sessions) > 1:
            raise ApiError(403, f"the keys are of two sessions, {sessions[0]!r} and {sessions[1]!r}; send one of them")
        if sessions:  # beside the server's key, too: one header may hold each
            return sessions[0]
        if self._api_key is None and not any(key.startswith(_PREFIX) for key in given):
            return None
        if self._api_key is not None and any(self._is_servers(key) for key in given):
            return None
        raise ApiError(
            401,
            "the key is not the server's, nor that of a session; send it as `Authorization: Bearer KEY` or as "
            "`x-api-key: KEY`",
            code="invalid_api_key",
        )

    def _is_servers(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._secret)

    def _session(self, key: str) -> str | None:
        name, _, signature = key.removeprefix(_PREFIX).partition(".")
        if not key.startswith(_PREFIX):
            return None
        try:
            session = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:
            return None
        return session if hmac.compare_digest(signature.encode(), self._signature(session).encode()) else None

    def _signature(self, session: str) -> str:
        return _text_of(hmac.digest(self._secret, session.encode(), hashlib.sha256))


def _text_of(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class SessionUrls:
    """ASGI application whose routes are also there under `/s/SESSION`: the session is noted in the request's scope."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"].startswith(b"/s/"):
            # As it was sent: a session's name may have quoted slashes.
            name, _, rest = scope["raw_path"].removeprefix(b"/s/").partition(b"/")
            rest = b"/" + rest
            if name:  # without one it is no route of ours
                scope = {**scope, _SESSION_OF_URL: unquote(name), "path": unquote(rest), "raw_path": rest}
        await self._app(scope, receive, send)


def session_path(session: str) -> str:
    """Return the beginning of the URLs of a session, behind host and port."""
    return f"/s/{quote(session, safe='')}"


def session_of_url(scope: Scope) -> str | None:
    """Return the session that a request's URL names."""
    return scope.get(_SESSION_OF_URL) or None
