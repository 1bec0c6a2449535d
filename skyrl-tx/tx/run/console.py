"""`tx console`: the dashboard of skyrl_train over a server's runs, restricted to the runs of each API key, and a page
to sample from checkpoints.

A separate process: it reads the server's run folders and writes nothing. A browser sends its key once, as
`/?token=KEY`, and is identified by a random cookie until the login expires; the sampling page sends requests with that
key. If the server has no keys, the console generates a token and prints it, since other users of the machine can reach
its port.
"""

import argparse
import hmac
import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import BinaryIO, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_inspect.dashboard.runs_folder import FolderEntry, NotBelowError, RunsFolder
from skyrl_inspect.dashboard.server import HEADERS, make_app
from skyrl_inspect.defaults import Defaults
from skyrl_train.errors import DataError
from tx.errors import ConfigError
from tx.tinker.api import get_address, open_socket
from tx.tinker.command_line import read_config
from tx.tinker.config import EngineConfig
from tx.tinker.http.api_keys import ADMIN, LOCAL, ApiKeys, Holder, extract_key, is_loopback, read_api_keys
from tx.tinker.types import SERVER

COOKIE = "tx_console"
LOGIN_HOURS = 12.0
ANSWER_SECONDS = 300
PLAYGROUND = "/playground"
_ASKED = {
    "models": ("GET", "/oai/api/v1/models"),
    "checkpoints": ("GET", "/api/v1/checkpoints?limit=1000"),
    "completions": ("POST", "/oai/api/v1/completions"),
}
"""What the page to sample may ask of the server, by the last part of the page's own path."""
MAX_BODY_BYTES = 1 << 20


class TenantRuns(RunsFolder):
    """Run folders of one tenant of a server. Other tenants' folders are neither listed nor opened.

    Args:
        path: `runs` of the state folder
        tenant: the owner, from `tinker.tenant` in each `config.yaml`
    """

    def __init__(self, path: Path, tenant: str):
        super().__init__(path)
        self._tenant = tenant
        self._own: dict[str, bool] = {}

    def entries(self, path: str) -> list[FolderEntry]:
        found = super().entries(path)
        return [entry for entry in found if self._is_own(entry.name)] if path == "." else found

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        self._check(path.split("/")[0])
        with super().open(path) as file:
            yield file

    @contextmanager
    def _get_folder(self, parts: list[str]) -> Iterator[int]:
        if parts:
            self._check(parts[0])
        with super()._resolve_folder(parts) as number:
            yield number

    def _check(self, run: str) -> None:
        if not self._is_own(run):
            raise NotBelowError(f"no such run: {run}")

    def _is_own(self, run: str) -> bool:
        if not self._own.get(run):  # once true it stays so; a folder may get its file a moment later
            self._own[run] = self._read_tenant(run) == self._tenant
        return self._own[run]

    def _read_tenant(self, run: str) -> str | None:
        try:
            config = json.loads((self.path / run / "config.yaml").read_bytes())  # JSON, as the server writes it
            return config["tinker"]["tenant"]
        except (OSError, ValueError, KeyError, TypeError):
            return None


class _Login(NamedTuple):
    holder: Holder
    key: str
    """Key for requests to the server; empty if it has none."""
    expires_at: float = inf
    """Time of `time.monotonic()`."""


class Console:
    """Application that routes each request to the pages of its key's tenant.

    Args:
        runs: `runs` of the state folder
        keys: if empty, the token gives access to everything
        server: URL of the server, for the page to sample
        login_hours: lifetime of a login
        token: for a console without keys

    Attributes:
        token: required without keys; generated if omitted
    """

    def __init__(
        self,
        runs: Path,
        keys: ApiKeys,
        server: str,
        defaults: Defaults | None = None,
        *,
        login_hours: float = LOGIN_HOURS,
        token: str | None = None,
    ):
        self._runs, self._keys, self._server = runs, keys, server.rstrip("/")
        self._login_seconds = login_hours * 3600
        self.token = token or secrets.token_urlsafe(24)
        self._defaults = defaults or Defaults()
        self._logins: dict[str, _Login] = {}
        self._pages: dict[Holder, ASGIApp] = {}
        routes = [Route(PLAYGROUND, self._render_playground), Route(f"{PLAYGROUND}.js", self._get_script)]
        routes += [
            Route(f"{PLAYGROUND}/{name}", partial(self._send_to_server, name), methods=[method])
            for name, (method, _) in _ASKED.items()
        ]
        self._own_pages = Starlette(routes=routes)

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and end of this process
            return await self._own_pages(scope, receive, send)
        request = Request(scope)
        # Without keys any page that a browser shows could ask, under a name of its own that leads here.
        if not self._keys and not is_loopback((request.url.hostname or "").strip("[]")):
            return await _render_page("use 127.0.0.1 or localhost as the host\n", "text/plain", 400)(
                scope, receive, send
            )
        login = self._find_login(request)
        if login is None:
            text = "This console needs an API key of the server: open it as /?token=KEY\n"
            if not self._keys:
                text = "This console needs the token that it printed at its start: open it as /?token=TOKEN\n"
            return await _render_page(text, "text/plain", 401)(scope, receive, send)
        if "token" in request.query_params:
            return await self._redirect_with_cookie(login)(scope, receive, send)
        if scope["path"].startswith(PLAYGROUND):
            scope["tx.login"] = login
            return await self._own_pages(scope, receive, send)
        await self._get_pages(login.holder)(scope, receive, send)

    def _find_login(self, request: Request) -> _Login | None:
        login = self._logins.get(request.cookies.get(COOKIE, ""))
        if login is not None and login.expires_at > time.monotonic() and "token" not in request.query_params:
            return login
        key = request.query_params.get("token") or extract_key(request.headers)
        if not self._keys:
            return _Login(LOCAL, "") if hmac.compare_digest(key.encode(), self.token.encode()) else None
        holder = self._keys.find_holder(key) if key else None
        return None if holder is None else _Login(holder, key)

    def _redirect_with_cookie(self, login: _Login) -> Response:
        """Return to the page without the key in its address. The cookie is random: a key is not kept in the browser."""
        number, now = secrets.token_urlsafe(32), time.monotonic()
        self._logins = {cookie: other for cookie, other in self._logins.items() if other.expires_at > now}
        self._logins[number] = login._replace(expires_at=now + self._login_seconds)
        answer = RedirectResponse("/", 303, HEADERS)
        answer.set_cookie(COOKIE, number, httponly=True, samesite="strict", max_age=int(self._login_seconds))
        return answer

    def _get_pages(self, holder: Holder) -> ASGIApp:
        if holder not in self._pages:
            folder = RunsFolder(self._runs) if holder.is_admin else TenantRuns(self._runs, holder.tenant)
            self._pages[holder] = make_app(folder, self._defaults, hosts=["*"])
        return self._pages[holder]

    # ---- the page to sample

    async def _render_playground(self, _: Request) -> Response:
        return _render_page(_read_asset("playground.html"), "text/html")

    async def _get_script(self, _: Request) -> Response:
        return _render_page(_read_asset("playground.js"), "text/javascript")

    async def _send_to_server(self, name: str, request: Request) -> Response:
        """Ask the server in the name of the key."""
        login: _Login = request.scope["tx.login"]
        method, path = _ASKED[name]
        if method == "POST" and request.headers.get("content-type") != "application/json":  # another site's form
            return _render_page('{"detail": "content-type must be application/json"}', "application/json", 415)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _render_page('{"detail": "the prompt is too long for this page"}', "application/json", 413)
        return await run_in_threadpool(self._handle_request, method, path, login.key, bytes(body) or None)

    def _handle_request(self, method: str, path: str, key: str, body: bytes | None) -> Response:
        headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
        asked = urllib.request.Request(f"{self._server}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
                return _render_page(answer.read(), "application/json", answer.status)
        except urllib.error.HTTPError as error:
            return _render_page(error.read(), "application/json", error.code)
        except OSError as error:
            text = json.dumps({"detail": f"the server does not respond ({error}): set its address with --server"})
            return _render_page(text, "application/json", 502)


def _read_asset(name: str) -> bytes:
    return (files("tx.run") / "assets" / name).read_bytes()


def _render_page(content: str | bytes, media_type: str, status: int = 200) -> Response:
    return Response(content, status, HEADERS, media_type=media_type)


def main(argv: Sequence[str]) -> int:
    """Serve until a signal. Returns 2 for wrong options."""
    options, rest = _build_parser().parse_known_args(list(argv))
    try:
        config = read_config(["--base-model", "-", *rest])
        app = make_console(config, options)
        listening = open_socket(options.host, options.port)
    except (ConfigError, DataError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    with listening:
        token = "" if app.has_keys else f"?token={app.token}"
        print(f"console of {config.state_folder}: {get_address(listening)}/{token}", flush=True)
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(settings).run(sockets=[listening])
    return 0


def make_console(config: EngineConfig, options: argparse.Namespace) -> Console:
    """Make the application. Raises: ConfigError, DataError."""
    keys = read_api_keys(config)
    if not keys and not is_loopback(options.host):
        raise ConfigError(
            f"--console-host {options.host} is reachable from other machines: set --api-keys-file, as for the server"
        )
    runs = config.state_folder / "runs"
    if not runs.is_dir():
        raise ConfigError(f"state_dir: {config.state_folder} has no runs; set --state-dir to that of the server")
    defaults = Defaults()
    defaults.load()
    if options.login_hours <= 0:
        raise ConfigError(f"--login-hours must be above 0; got {options.login_hours}")
    server = options.server or f"http://{config.host}:{config.port}"
    return Console(runs, keys, server, defaults, login_hours=options.login_hours)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tx console",
        description=f"Web pages about a server's runs: those of the given key ({ADMIN} keys: all runs and the "
        f"`{SERVER}` log), and sampling from checkpoints. Other options as for `tx serve`: --state-dir, "
        "--api-keys-file, --host, --port.",
        allow_abbrev=False,
    )
    parser.add_argument("--console-host", dest="host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--console-port", dest="port", type=int, default=8265, help="port to listen on, 0 for a free one"
    )
    parser.add_argument(
        "--login-hours", type=float, default=LOGIN_HOURS, help="hours after which a browser must enter its key again"
    )
    parser.add_argument("--server", help="URL of the server, if it differs from --host and --port")
    return parser
