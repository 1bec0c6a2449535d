"""`python -m skyrl_train.dashboard RUNS_DIR [--host 127.0.0.1] [--port 8265] [--token-file PATH] [--open]`, or
`--terminal RUN`"""

import argparse
import ipaddress
import runpy
import sys
import webbrowser
from pathlib import Path

import uvicorn

from skyrl_inspect.dashboard import agent_files
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.dashboard.terminal import show
from skyrl_inspect.defaults import Defaults
from skyrl_train.errors import ConfigError, SkyRLError

MIN_TOKEN = 16


def main(arguments: list[str] | None = None) -> int:
    options = _build_parser().parse_args(arguments)
    try:
        for file in options.files:
            runpy.run_path(str(file))
        if options.terminal:
            show(options.runs_dir)
            return 0
        is_file = options.runs_dir.name == agent_files.NAME and options.runs_dir.is_file()
        folder = RunsFolder(options.runs_dir.parent if is_file else options.runs_dir)
        token = read_token(options.host, options.token_file)
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    defaults = Defaults()
    defaults.load()
    app = make_app(folder, defaults) if token is None else make_app(folder, defaults, token=token, hosts=["*"])
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # open pages hold a stream of events
    )
    server = uvicorn.Server(config)
    sockets = [config.bind_socket()]
    sockets[0].listen()  # before the address is printed: a client may connect immediately
    port = sockets[0].getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"dashboard of {folder.path}: http://{host}:{port}/", flush=True)
    if options.open:
        webbrowser.open(f"http://{host}:{port}/")
    server.run(sockets)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.dashboard",
        description="Serve web pages about runs from the files in their folders. Read-only.",
    )
    parser.add_argument(
        "runs_dir",
        type=Path,
        help="a folder of run folders, a run folder, or trajectories.jsonl of skyrl-agent",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8265, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file with a secret that a browser sends once, as /?token=SECRET; required unless --host is loopback",
    )
    parser.add_argument(
        "--terminal", action="store_true", help="show the run RUNS_DIR in this terminal instead of serving pages"
    )
    parser.add_argument(
        "--import", dest="files", action="append", default=[], type=Path, metavar="FILE",
        help="Python file to run first, which registers environments that render their trajectories; repeatable",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="show the list of runs in the browser")
    return parser


def read_token(host: str, path: Path | None) -> str | None:
    """Return the token of a file.

    Raises:
        ConfigError: the token is too short to be a secret, or missing for an address other than loopback.
    """
    if path is not None:
        token = path.read_text(encoding="utf-8").strip()
        if len(token) < MIN_TOKEN:
            raise ConfigError(f"--token-file {path} holds {len(token)} characters, but needs at least {MIN_TOKEN}")
        return token
    if host != "localhost" and not _is_loopback(host):
        example = "openssl rand -hex 24 > token"
        raise ConfigError(
            f"--host {host} can be reached from other machines: it needs --token-file PATH, a file with a secret "
            f"({example}). Or forward the port: ssh -L 8265:127.0.0.1:8265 HOST"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it leads is not known here
        return False


if __name__ == "__main__":
    sys.exit(main())
