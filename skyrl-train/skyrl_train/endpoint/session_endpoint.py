"""Endpoint for agent harnesses: one server with a request recorder, running while trajectories are generated."""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyrl_train.endpoint.recorder import RequestRecorder
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.utils.chat_templates import get_custom_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.config import GeneratorConfig

_CHUNK = 1 << 16
_FOLDER_PREFIX, _LOCK = "skyrl-endpoint-", "lock"


def build_endpoint_settings(cfg: "GeneratorConfig") -> dict[str, Any]:
    """Build the keywords of `EndpointServer` from the `generator` settings. Requests default to
    `generator.sampling_params`.
    """
    sampling = cfg.sampling_params
    return {
        "model_name": cfg.served_model_name or cfg.model_name,
        "chat_template": get_custom_chat_template(cfg.chat_template),
        "chat_template_kwargs": cfg.chat_template_kwargs,
        "request_timeout_seconds": cfg.request_timeout_seconds,
        "max_requests": cfg.http_endpoint_max_requests,
        "sampling_defaults": {
            name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        },
    }


@dataclass(frozen=True)
class Endpoint:
    """Running server.

    Args:
        socket_path: Unix socket forwarded to it, for sandboxes without network.
    """

    server: EndpointServer
    recorder: RequestRecorder
    socket_path: str

    @property
    def model(self) -> str:
        return self.server.frontend.model_names[0]


class SharedEndpoint:
    """Endpoint shared by concurrent batches: the first one starts it, the last one stops it.

    Args:
        client: one engine, or a client over many.
    """

    def __init__(
        self, cfg: "GeneratorConfig", client: InferenceEngineInterface, tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._tokenizer = tokenizer
        self._users = 0
        self._open: Endpoint | None = None
        self._stack = contextlib.AsyncExitStack()
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Endpoint]:
        """Run the endpoint within the block, in the current event loop."""
        async with self._changing:
            if self._open is None:
                self._open = await self._start()
            self._users += 1
            endpoint = self._open
        try:
            yield endpoint
        finally:
            self._users -= 1
            async with self._changing:
                if self._users == 0 and self._open is not None:
                    self._open = None
                    await self._stack.aclose()

    async def _start(self) -> Endpoint:
        recorder = RequestRecorder(begun_only=True)
        settings = build_endpoint_settings(self._cfg)
        # On loopback and with a key: other local processes must not add turns to a trajectory.
        server = EndpointServer(
            self._client, self._tokenizer, api_key=secrets.token_urlsafe(32), recorder=recorder, **settings
        )
        async with contextlib.AsyncExitStack() as stack:
            await server.start()
            stack.push_async_callback(server.stop)
            folder = stack.enter_context(create_socket_folder())
            path = os.path.join(folder, "socket")
            port = urlsplit(server.url).port
            connections: set[asyncio.Task[None]] = set()
            pipes = await asyncio.start_unix_server(partial(_forward, connections, port), path)
            # The sandbox runs as another user; the enclosing folder restricts access.
            os.chmod(path, 0o666)
            stack.push_async_callback(_close_connections, connections)
            stack.callback(pipes.close)
            self._stack = stack.pop_all()
        return Endpoint(server, recorder, path)


@contextlib.contextmanager
def create_socket_folder() -> Iterator[str]:
    """Create a folder for this process within the block. Folders of killed processes are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        # Folders of other users or without a lock are kept; a locked one is in use.
        with contextlib.suppress(OSError), open(left / _LOCK, "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder, open(os.path.join(folder, "new"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, os.path.join(folder, _LOCK))  # never visible without a lock
        yield folder


async def _forward(
    connections: set[asyncio.Task[None]], port: int | None, near: asyncio.StreamReader, back: asyncio.StreamWriter
) -> None:
    """Forward one connection to the server."""
    task: asyncio.Task[None] | None = asyncio.current_task()
    assert task is not None
    connections.add(task)
    try:
        far, onward = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_copy_bytes(near, onward), _copy_bytes(far, back))
        finally:
            onward.close()
    except (OSError, asyncio.CancelledError):  # the server has stopped
        pass
    finally:
        back.close()
        connections.discard(task)


async def _close_connections(connections: set[asyncio.Task[None]]) -> None:
    """Close connections of killed harnesses."""
    for task in list(connections):
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _copy_bytes(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
