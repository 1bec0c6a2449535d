"""HTTP server of the dashboard: pages from the package, answers made from files, and server-sent events. Read-only.

Text of a run is untrusted. It leaves as JSON, the script puts it into the page only as text, and the content security
policy lets a browser run nothing but the scripts of this package and reach nothing but this server.
"""

import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.resources import files

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_inspect.dashboard.catalog import Catalog, find_command, find_in_log, list_trajectory_steps
from skyrl_inspect.dashboard.charts import build_overview, group_metrics, list_timing_stages
from skyrl_inspect.dashboard.curves import TIME, Curves
from skyrl_inspect.dashboard.json_lines import parse
from skyrl_inspect.dashboard.live import iter_change_events
from skyrl_inspect.dashboard.renderers import FRAME_POLICY, render
from skyrl_inspect.dashboard.run_diagnostics import read_run_diagnostics
from skyrl_inspect.dashboard.runs_folder import NotBelowError, RunsFolder, join
from skyrl_inspect.dashboard.steps import StepTrajectories
from skyrl_inspect.dashboard.time_line import Timelines, build_trace_events
from skyrl_inspect.defaults import Defaults
from skyrl_train.utils.run_folder import replace_non_finite

COOKIE = "skyrl_dashboard"
EXPLANATIONS = "explanations/"
"""Beginning of the names under which texts of `skyrl_train.explain` are shown among the logs."""

LOG_WINDOW = 128 << 10
"""Bytes of a log that are sent at once."""

MAX_NAMES = 64
"""Curves that one answer holds."""

MAX_STREAMS = 64

POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "frame")),
        "img-src 'self' data:",
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
ASSETS = files("skyrl_inspect.dashboard") / "assets"


def make_app(
    folder: RunsFolder,
    defaults: Defaults,
    *,
    token: str | None = None,
    hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]"),
) -> Starlette:
    """Make the server's application.

    Args:
        folder: the runs that are shown.
        defaults: of all settings, which the list compares with.
        token: secret that a browser must give once (`/?token=…`), or a program with each request; None asks for none.
        hosts: names under which it may be asked. A page elsewhere that lets its own name point here is refused by it.
    """
    queries = RunQueries(folder, defaults)
    api = {
        "runs": queries.runs,
        "run": queries.run,
        "metrics": queries.metrics,
        "curves": queries.curves,
        "step": queries.step,
        "sample": queries.sample,
        "columns": queries.columns,
        "rendered": queries.rendered,
        "settings": queries.settings,
        "logs": queries.logs,
        "log": queries.log,
        "lanes": queries.lanes,
        "perfetto": queries.perfetto,
    }
    routes = [Route(f"/api/{name}", partial(_compute_in_thread, answer)) for name, answer in api.items()]
    routes += [Route("/api/live", queries.live), Route("/", _page), Route("/assets/{name:path}", _asset)]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(GuardMiddleware, token=token),
    ]
    middleware.append(Middleware(GZipMiddleware, minimum_size=20_000, compresslevel=1))
    return Starlette(routes=routes, middleware=middleware)


async def _compute_in_thread(answer: Callable[[Request], Response], request: Request) -> Response:
    """Compute an answer in a thread, as it reads files."""
    try:
        return await run_in_threadpool(answer, request)
    except NotBelowError as error:
        return JSONResponse({"error": str(error)}, 404)
    except BadQueryError as error:
        return JSONResponse({"error": str(error)}, 400)
    except OSError as error:  # the disk of the runs is unavailable
        return JSONResponse({"error": f"{error.strerror}"}, 503)


class BadQueryError(ValueError):
    """A query that this server does not understand."""


class GuardMiddleware:
    """Headers of every answer, and the token."""

    def __init__(self, app: ASGIApp, token: str | None):
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        await (self._make_refusal(request) or self._app)(scope, receive, send_with_headers)

    def _make_refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without the token, and to the one that brings it."""
        if self._token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            answer = RedirectResponse("/", 303)  # the address of the page does not keep it
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict", max_age=30 * 86400)
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return Response("This dashboard needs a token: open it as /?token=TOKEN\n", 401, media_type="text/plain")

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())


async def _page(_: Request) -> Response:
    return _file("index.html")


async def _asset(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    if name not in _NAMES:  # of the files of the package, and nothing else
        return Response("no such file\n", 404, media_type="text/plain")
    return Response(ASSETS.joinpath(name).read_bytes(), media_type=TYPES[name.rpartition(".")[2]])


def _list_assets() -> frozenset[str]:
    folders = {"": ASSETS, "vendor/": ASSETS / "vendor"}
    return frozenset(
        prefix + file.name for prefix, folder in folders.items() for file in folder.iterdir() if file.is_file()
    )


_NAMES = _list_assets()


class RunQueries:
    """Answers to the queries of the page, each made from files."""

    def __init__(self, folder: RunsFolder, defaults: Defaults):
        self._folder = folder
        self._catalog = Catalog(folder, defaults)
        self._curves = Curves(folder)
        self._steps = StepTrajectories(folder)
        self._timelines = Timelines(folder)
        self._num_streams = 0

    def runs(self, _: Request) -> Response:
        """Return all runs of the folder."""
        return _to_json({"folder": self._folder.path.name, "now": time.time(), "runs": self._catalog.list_rows()})

    def run(self, request: Request) -> Response:
        """Return one run with its stored trajectory steps and diagnostics."""
        run = _run(request)
        row, curves = self._catalog.get_row(run), self._curves.read_curves(run)
        found = read_run_diagnostics(self._folder, run, curves)
        steps = list_trajectory_steps(self._folder, run)
        again = find_command(self._folder, run)
        return _to_json({"now": time.time(), **row, "steps": steps, "diagnostics": found, "command": again})

    def metrics(self, request: Request) -> Response:
        """Return the names of a run's metrics, in groups and as the charts of its overview."""
        names = self._curves.read_curves(_run(request)).names
        charts = {
            "overview": build_overview(names),
            "groups": group_metrics(names),
            "timing": list_timing_stages(names),
        }
        return _to_json({"names": names, **charts})

    def curves(self, request: Request) -> Response:
        """Return the curves of some metrics, with the times of the steps."""
        names = request.query_params.getlist("name")
        if len(names) > MAX_NAMES:
            raise BadQueryError(f"at most {MAX_NAMES} curves can be requested at once; got {len(names)}")
        found = self._curves.read_curves(_run(request))
        return _to_json({"time": found.curve(TIME), "curves": {name: found.curve(name) for name in names}})

    def step(self, request: Request) -> Response:
        """Return a row for each trajectory of a step."""
        return _to_json(self._steps.summary(_run(request), *_step(request)))

    def sample(self, request: Request) -> Response:
        """Return one trajectory as stored; broken lines are passed on for display."""
        line = self._steps.row(_run(request), *_step(request), _parse_number(request, "line"))
        return Response(line, media_type="application/json")

    def columns(self, request: Request) -> Response:
        """Return what training knew of the tokens of a trajectory; {} for one of an evaluation or an earlier
        release."""
        phase, step = _step(request)
        number = _parse_number(request, "line")
        return _to_json(self._steps.columns(_run(request), step, number) if phase == "train" else {})

    def rendered(self, request: Request) -> Response:
        """Return a trajectory as its environment shows it; no content if the environment has no renderer."""
        run = _run(request)
        row = parse(self._steps.row(run, *_step(request), _parse_number(request, "line")))
        if row is None:
            return Response(status_code=204)
        environment = row.get("env_class") or self._catalog.get_settings(run).values.get("environment.env_class")
        page = render(environment, row)
        if page is None:
            return Response(status_code=204)
        headers = {"content-security-policy": FRAME_POLICY}
        return Response(page.encode("utf-8", "replace"), media_type="text/html", headers=headers)

    def settings(self, request: Request) -> Response:
        """Return the settings of a run, and those that are not at their defaults."""
        run = _run(request)
        found, changes = self._catalog.get_settings(run), self._catalog.get_changed_settings(run)
        return _to_json({"text": found.text, "values": found.values, "changes": changes})

    def logs(self, request: Request) -> Response:
        """Return names and sizes of a run's logs, and of its explanations of hangs."""
        run = _run(request)
        found = [(entry.name, entry) for entry in self._folder.entries(join(run, "logs"))]
        hangs = self._folder.entries(join(run, "explanations"))
        found += [(EXPLANATIONS + entry.name, entry) for entry in hangs if entry.name.endswith(".txt")]
        return _to_json({"logs": [[name, entry.state.size] for name, entry in found if not entry.is_folder]})

    def log(self, request: Request) -> Response:
        """Return a part of a log around an offset, its end without one, or the lines that hold `query`."""
        name = request.query_params.get("name", "")
        path = join(_run(request), "" if name.startswith(EXPLANATIONS) else "logs", name)
        if query := request.query_params.get("query"):
            return _to_json({"hits": find_in_log(self._folder, path, query)})
        state = self._folder.state(path)
        if state is None:
            raise NotBelowError(f"{path} does not exist")
        start = max(0, state.size - LOG_WINDOW)
        if "offset" in request.query_params:
            start = min(start, max(0, _parse_number(request, "offset") - LOG_WINDOW // 4))
        with self._folder.open(path) as file:
            file.seek(start)
            text = file.read(LOG_WINDOW)
        return _to_json({"start": start, "size": state.size, "text": text.decode("utf-8", "replace")})

    def lanes(self, request: Request) -> Response:
        """Return who did what when in a step, and the steps that have it."""
        step = _parse_number(request, "step") if "step" in request.query_params else None
        return _to_json(self._timelines.lanes(_run(request), step))

    def perfetto(self, request: Request) -> Response:
        """Return the time line of the last steps in the format of Chrome traces, which Perfetto opens."""
        run = _run(request)
        curves = self._curves.read_curves(run)
        records = self._timelines.read_last_records(run)
        events = build_trace_events(records, curves.curve(TIME), curves.curve("timing/step"))
        headers = {"content-disposition": 'attachment; filename="trace.json"'}
        return JSONResponse({"traceEvents": events, "displayTimeUnit": "ms"}, headers=headers)

    async def live(self, request: Request) -> Response:
        """Stream an event whenever files of a run change; of any run without `run`."""
        if self._num_streams >= MAX_STREAMS:
            return JSONResponse({"error": "too many open pages"}, 503)
        run = request.query_params.get("run")
        look = partial(self._compute_signature, run)
        return StreamingResponse(self._iter_events(look), media_type="text/event-stream")

    def _compute_signature(self, run: str | None) -> object:
        """Return a value that changes with the files that a page shows."""
        if run is None:
            states = [(name, *self._catalog.get_file_states(name).values()) for name in self._catalog.list_runs()]
            return [self._catalog.defaults.values is None, *states]
        steps = list_trajectory_steps(self._folder, run)
        return [*self._catalog.get_file_states(run).values(), {phase: found[-1:] for phase, found in steps.items()}]

    async def _iter_events(self, look: Callable[[], object]) -> AsyncIterator[str]:
        self._num_streams += 1
        try:
            async for event in iter_change_events(look):
                yield event
        finally:
            self._num_streams -= 1


def _to_json(value: object) -> Response:
    def encode(value: object) -> str:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)

    try:
        text = encode(value)
    except ValueError:  # a number of a file that JSON does not have
        text = encode(replace_non_finite(value))
    return Response(text, media_type="application/json")


def _run(request: Request) -> str:
    run = request.query_params.get("run")
    if run is None:
        raise BadQueryError("specify a run: ?run=NAME")
    return run


def _step(request: Request) -> tuple[str, int]:
    return request.query_params.get("phase", "train"), _parse_number(request, "step")


def _parse_number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise BadQueryError(f"{name} must be an integer of at least 0; got {text[:40]!r}")
    return int(text)
