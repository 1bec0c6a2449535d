"""The door: no request goes further without a tenant. Before routing, so that unknown paths need a key too."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tx.tinker.http.api_keys import LOCAL_TENANT, ApiKeys, key_of
from tx.tinker.http.replies import problem
from tx.tinker.http.scope import TENANT

DOWNLOADS = "/api/v1/downloads/"
"""Open to whoever has the signed address: users hand it to programs that know no key."""
STATUS_PAGES = ("/healthz", "/api/v1/healthz", "/metrics", "/status")
"""Open where the server listens on loopback only."""


class Door:
    """
    Args:
        keys: none means that everybody is the tenant `local`
        open_paths: need no key
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]):
        self.app = app
        self.keys = keys
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        tenant = LOCAL_TENANT
        if self.keys:
            key = key_of(Headers(scope=scope))
            tenant = self.keys.tenant_of(key) if key else None
            if tenant is None and not self._is_open(scope["path"]):
                return await _refusal(bool(key), scope["path"])(scope, receive, send)
        scope[TENANT] = tenant
        return await self.app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self.open_paths or path.startswith(DOWNLOADS)


def _refusal(had_key: bool, path: str):
    text = "this API key is not known here" if had_key else "an API key is needed, in the header X-API-Key"
    scheme = 'Basic realm="tx"' if path == "/status" else "Bearer"
    return problem(401, text, {"WWW-Authenticate": scheme})
