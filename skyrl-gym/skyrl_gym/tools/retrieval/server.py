"""Retrieval server in a thread of this process (`RetrievalServer`) or as a separate process (`serve`)."""

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from skyrl_gym.tools.retrieval.settings import RetrievalSettings
from skyrl_gym.tools.retrieval.store import Retriever, build_index, open_retriever

if TYPE_CHECKING:
    from fastapi import FastAPI

START_SECONDS = 30
STOP_SECONDS = 10
IDLE_CONNECTION_SECONDS = 30
"""Longer than clients keep theirs, so that it is they who close it."""

_SETTINGS_VARIABLE = "SKYRL_GYM_RETRIEVAL_SETTINGS"


class RetrievalServer:
    """A real retrieval server on the loopback, in a thread of this process, for as long as the `with` block lasts.

        with RetrievalServer(["Paris is the capital of France."]) as server:
            env = skyrl_gym.make("search", env_config={"search_url": server.url}, extras=row)

    After `stop` it can be started again, at the same address.
    """

    def __init__(
        self, documents: "Sequence[Mapping[str, object] | str] | Retriever", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """
        Args:
            documents: documents for a BM25 search (see `corpus`), or a retriever.
            port: 0 for a free one.

        Raises:
            CorpusError: a document is invalid.
        """
        self.retriever = documents if isinstance(documents, Retriever) else Retriever.of(documents)
        self.host = host
        self.port = port
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        return _format_address(self.host, self.port)

    @property
    def url(self) -> str:
        """The `search_url` of environments."""
        return f"{self.base_url}/retrieve"

    def start(self) -> None:
        """Wait until the server answers. Raises OSError if the port is taken, TimeoutError."""
        import uvicorn

        from skyrl_gym.tools.retrieval.app import create_app

        listener = _open_listener(self.host, self.port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            create_app(self.retriever),
            loop="asyncio",
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="retrieval-server")
        self._thread.daemon = True
        self._thread.start()
        # uvicorn has no callback for its start: its flag is polled.
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                listener.close()
                raise TimeoutError(f"the retrieval server did not start within {START_SECONDS} s")
            time.sleep(0.005)

    def stop(self) -> None:
        """Answer pending requests and stop. May be called more than once. Raises TimeoutError."""
        if self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        # A search in native code cannot be interrupted: the thread, a daemon, is then left to the end of the process.
        if self._thread.is_alive():
            raise TimeoutError(f"the retrieval server did not stop within {STOP_SECONDS} s")
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _format_address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open_listener(host: str, port: int) -> socket.socket:
    """Bind a socket. asyncio sends small packets at once only through sockets that say that they are TCP; through
    others each answer on a used connection waits 40 ms for the client's delayed acknowledgement."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A server that is started again at the same port must not wait for old connections to time out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    settings: RetrievalSettings, host: str = "127.0.0.1", port: int = 8000, workers: int = 1, log_requests: bool = False
) -> None:
    """Build the index if it is absent, then serve it until SIGTERM or SIGINT. Listens once it can answer.

    Args:
        port: 0 for a free one; the address is printed.
        workers: processes; they share the index through the memory map.

    Raises as `build_index`.
    """
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    folder = build_index(settings)
    with _open_listener(host, port) as listener:
        # Worker processes are started anew and take nothing but their environment from here.
        os.environ[_SETTINGS_VARIABLE] = replace(settings, rebuild=False).to_json()
        config = uvicorn.Config(
            "skyrl_gym.tools.retrieval.server:_make_worker_app",
            factory=True,
            workers=workers,
            loop="asyncio",
            access_log=log_requests,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=5,
        )
        address = _format_address(host, listener.getsockname()[1])
        print(f"serving {folder} ({settings.index}) at {address}/retrieve as soon as it is loaded", flush=True)
        # The socket is bound here: workers accept from the same one, and the kernel divides the connections.
        if workers > 1:
            Multiprocess(config, sockets=[listener]).run()
        else:
            uvicorn.Server(config).run(sockets=[listener])


def _make_worker_app() -> "FastAPI":
    from uvicorn.config import STARTUP_FAILURE

    from skyrl_gym.tools.retrieval.app import create_app

    settings = RetrievalSettings.from_json(os.environ[_SETTINGS_VARIABLE])
    try:
        return create_app(open_retriever(settings), settings)
    except (ValueError, OSError, ImportError) as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(STARTUP_FAILURE)  # a worker that ends so is not started again
