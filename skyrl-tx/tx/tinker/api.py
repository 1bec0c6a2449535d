"""`python -m tx.tinker.api --base-model NAME_OR_DIR`: the server. Builds the parts, listens, closes them in order."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI

from skyrl_gym.waits import recorded_run
from tx.errors import ConfigError
from tx.tinker.backends.build import check_backend
from tx.tinker.backends.explanations import write_explanation
from tx.tinker.base_model import read_base_model
from tx.tinker.command_line import read_config
from tx.tinker.config import EngineConfig
from tx.tinker.file_limit import FEW, raise_file_limit
from tx.tinker.http.api_keys import read_api_keys
from tx.tinker.http.app import create_app
from tx.tinker.http.connections import Connections, compute_connection_limit
from tx.tinker.service.run_files import get_server_log_path, log_to_file
from tx.tinker.service.service import TinkerService
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store
from tx.tinker.types import SERVER

logger = logging.getLogger(__name__)

LAST_ANSWERS_SECONDS = 3
"""Time that pending requests have when the server stops."""
BACKLOG = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns the exit status: 0 after SIGTERM or SIGINT, 2 for wrong settings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what the web server raises again once it has closed
    try:
        config = read_config(sys.argv[1:] if argv is None else argv)
        with asyncio.Runner(loop_factory=_get_loop_factory()) as runner:
            runner.run(serve(config))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


async def serve(config: EngineConfig) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: the settings cannot be satisfied; nothing was started.
    """
    keys = read_api_keys(config)
    check_backend(config)
    facts = read_base_model(config.base_model)
    connections = _build_connections()
    state = config.state_folder
    folders = Folders(config.checkpoints_base, state / "cache")
    listening = open_socket(config.host, config.port)
    state.mkdir(parents=True, exist_ok=True)
    run, log_file = state / "runs" / SERVER, get_server_log_path(state / "runs")
    with listening, recorded_run(run / "waits", SERVER, explainer=write_explanation, log=str(log_file)):
        service = TinkerService(config, facts, Store(config.store_url), Blobs(state / "blobs"), folders)
        await service.start()
        log_to_file(log_file)  # now that no other server has this folder
        try:
            server = Server(create_app(service, config, facts, folders, keys, connections), connections)
            gc.freeze()  # startup objects are permanent: exclude them from later collections
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(_stop_on_fatal_config_error(server, service))
                await server.serve(sockets=[listening])
                watching.cancel()
        finally:
            await service.close()
    if service.fatal_config_error.is_set():
        raise ConfigError("the engine rejected these settings; see the reason in the log above")


def _build_connections() -> Connections:
    files = raise_file_limit()
    connections = Connections(compute_connection_limit(files))
    logger.info("at most %d open files are allowed, which allows %d connections", files, connections.limit)
    if files < FEW:
        logger.warning("this is low for many clients: raise the hard limit (`ulimit -Hn`, systemd's LimitNOFILE)")
    return connections


async def _stop_on_fatal_config_error(server: "Server", service: TinkerService) -> None:
    await service.fatal_config_error.wait()
    server.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket. Connections queue until the server accepts them.

    Raises:
        ConfigError: the address is in use, or not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Named: without it asyncio leaves Nagle's algorithm on, which delays each response by 40 ms.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
    return listening


class Server(uvicorn.Server):
    """Web server that reports its address and answers pending polls when it closes."""

    def __init__(self, app: FastAPI, connections: Connections):
        super().__init__(
            uvicorn.Config(
                app,
                http=connections.protocol(),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,  # longer than clients keep theirs, so that they seldom find one closed
                timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
                ws="none",
            )
        )
        self.app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            print(f"tx listens on {get_address(listening)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.polls.release()
        await super().shutdown(sockets)


def get_address(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _get_loop_factory():
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
