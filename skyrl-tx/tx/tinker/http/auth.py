"""Authentication: every request needs a tenant. Runs before routing, so that unknown paths need a key too."""

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.tinker.http.api_keys import LOCAL, ApiKeys, extract_key
from tx.tinker.http.replies import build_problem
from tx.tinker.http.scope import IS_ADMIN, TENANT

DOWNLOADS = "/api/v1/downloads/"
"""Open to anyone with the signed URL: users pass it to programs that know no key."""
OPEN_PATHS = ("/healthz", "/api/v1/healthz")
"""Paths that need no key: they report only that the server is up."""


class Authenticator:
    """
    Args:
        keys: none means that everybody is the tenant `local`, and may see everything
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys):
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        holder = LOCAL
        if self.keys:
            key = extract_key(Headers(scope=scope))
            holder = self.keys.find_holder(key) if key else None
            if holder is None and not _is_open(scope["path"]):
                return await _build_refusal(bool(key))(scope, receive, send)
        scope[TENANT], scope[IS_ADMIN] = holder or (None, False)
        return await self.app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(DOWNLOADS)


def _build_refusal(had_key: bool) -> Response:
    text = "unknown API key" if had_key else "an API key is required in the header X-API-Key"
    return build_problem(401, text, {"WWW-Authenticate": "Bearer"})
