"""Lines of JSON over the standard input and output of a process, each with a deadline and of bounded length."""

import contextlib
import json
import os
import select
import time
from typing import Any

from skyrl_gym.envs.rlm.repl_process import MAX_FRAME_BYTES
from skyrl_gym.sandbox.base import SandboxProcess

CHUNK = 1 << 16


class BadFrame(Exception):
    """Received data that is not one of the frames of `repl_process`."""


class Pipe:
    """Frames to and from a process. Deadlines are times of `time.monotonic`."""

    def __init__(self, process: SandboxProcess) -> None:
        self._process = process
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._in, False)  # a process that does not read must not hold its writer
        self._received = bytearray()

    def send(self, frame: list[object], deadline: float) -> None:
        """Raises TimeoutError, and OSError if the process has exited."""
        rest = memoryview(json.dumps(frame).encode("ascii") + b"\n")
        while rest:
            _wait_for(self._in, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._in, rest[:CHUNK]) :]

    def receive(self, deadline: float) -> list[Any]:
        """Raises TimeoutError, EOFError if the process has exited, and BadFrame."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > MAX_FRAME_BYTES:
                raise BadFrame(f"a line of more than {MAX_FRAME_BYTES} bytes")
            _wait_for(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, CHUNK)
            if not chunk:
                raise EOFError
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError) as failure:
            raise BadFrame(f"not a line of JSON: {line[:80]!r}") from failure
        if not isinstance(frame, list):
            raise BadFrame(f"not a JSON array: {line[:80]!r}")
        return frame

    def close(self) -> None:
        """Close this side of the pipe."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()


def _wait_for(descriptor: int, event: int, deadline: float) -> None:
    """Wait until there is data, or the other side has closed. Raises TimeoutError."""
    remaining = deadline - time.monotonic()
    poll = select.poll()  # `select.select` refuses descriptors over 1023
    poll.register(descriptor, event)
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise TimeoutError
