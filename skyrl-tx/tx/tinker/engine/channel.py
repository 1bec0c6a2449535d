"""Channel between the API process and one engine process: messages both ways, in order, over a Unix socket.

Every engine gets a new socket, so that messages to a crashed engine never reach its successor. The channel does not
detect whether its peer is alive: the API watches the child process, and the engine its parent (`process.py`). Messages
not read before a crash are lost; the database still has the requests.
"""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tx.tinker.commands import Train
from tx.tinker.engine.messages import Done, FromApi, FromEngine

_LARGE_FIELD: dict[type, str] = {Train: "payload", Done: "result"}
"""Bytes that are sent with the message without being copied into it."""
_LARGE_BYTES = 32 << 10
_LONGEST_SOCKET_PATH = 100
"""Bytes; Linux takes 107, macOS 103."""

_FLUSH_MILLISECONDS = 1000
_encoder = msgspec.msgpack.Encoder()


class ApiChannel:
    """API side of the channel, created before the engine starts, with the address for it. One event loop."""

    def __init__(self, socket: zmq.asyncio.Socket, address: str, temporary: Path | None):
        self._socket, self.address, self._temporary = socket, address, temporary
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    def bind(cls, folder: Path) -> "ApiChannel":
        """
        Args:
            folder: for the socket; made for the owner alone. Where its path is too long for a socket, a temporary one
                is taken.
        """
        name, temporary = f"engine-{secrets.token_hex(4)}.sock", None
        if len(bytes(folder.absolute() / name)) > _LONGEST_SOCKET_PATH:
            temporary = folder = Path(tempfile.mkdtemp(prefix="tx-"))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder.absolute() / name
        socket = _create_socket(zmq.asyncio.Context.instance())
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        return cls(socket, f"ipc://{path}", temporary)

    async def send(self, message: FromApi) -> None:
        """Queue a message for the engine, which may not have started yet. Does not wait for it."""
        self._socket.send_multipart(_encode_frames(message), copy=False)  # its future would wait for the other side

    def __aiter__(self) -> AsyncIterator[FromEngine]:
        return _receive_messages(self._socket, self._decoder)

    def close(self) -> None:
        """End `async for`, and remove the socket file."""
        self._socket.close(linger=0)
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class EngineChannel:
    """Engine side of the channel. `send` from any thread; everything else in the loop that created it."""

    def __init__(self, address: str):
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(FromApi)
        self._context = zmq.asyncio.Context()
        self._socket = _create_socket(self._context)
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Never waits. Messages of one thread arrive in its order; after `close` they go nowhere."""
        frames = _encode_frames(message)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._send, frames)

    def _send(self, frames: list[bytes]) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(frames, copy=False)

    def __aiter__(self) -> AsyncIterator[FromApi]:
        return _receive_messages(self._socket, self._decoder)

    async def close(self) -> None:
        """Close after delivering earlier messages, if the other side reads them within a second."""
        await asyncio.sleep(0)  # sends of other threads, which wait in the loop
        self._socket.close(linger=_FLUSH_MILLISECONDS)
        await asyncio.to_thread(self._context.term)


def _create_socket(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0  # no limit here: the API bounds the requests in flight
    return socket


def _encode_frames(message: FromApi | FromEngine) -> list[bytes]:
    field = _LARGE_FIELD.get(type(message))
    if field is None or len(getattr(message, field)) < _LARGE_BYTES:
        return [_encoder.encode(message)]
    return [_encoder.encode(msgspec.structs.replace(message, **{field: b""})), getattr(message, field)]


async def _receive_messages(socket: zmq.asyncio.Socket, decoder: msgspec.msgpack.Decoder) -> AsyncIterator[Any]:
    while not socket.closed:
        try:
            frames = await socket.recv_multipart(copy=False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if socket.closed and not (task and task.cancelling()):  # closing cancels what waits on the socket
                return
            raise
        message = decoder.decode(frames[0].buffer)
        if len(frames) == 2:
            message = msgspec.structs.replace(message, **{_LARGE_FIELD[type(message)]: frames[1].bytes})
        yield message
