"""Messages to and from a process in a sandbox: a JSON object on a line, each way with a deadline."""

import json
import os
import select
import time
from typing import Any

from skyrl_gym.sandbox.base import ExecResult, SandboxProcess

MAX_LINE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 16


class DeadlineExceeded(Exception):
    """The deadline came first."""


class Ended(Exception):
    """The process closed the channel or sent an invalid message, and cannot be used further."""

    def __init__(self, channel: "Channel", text: str):
        super().__init__(f"{channel.name} {text}")
        self.channel = channel


class Channel:
    """Message channel to one process. Deadlines are in terms of `time.monotonic`."""

    def __init__(self, process: SandboxProcess, name: str):
        """`name` is for errors."""
        self.name = name
        self._process = process
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._read = bytearray()

    def ask(self, request: dict[str, object], deadline: float) -> dict[str, Any]:
        """Raises Ended, Late."""
        self.send(json.dumps(request).encode() + b"\n", deadline)
        return self.message(self.receive(deadline))

    def message(self, line: bytes) -> dict[str, Any]:
        """Decode one line of this process. Raises Ended."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as failure:
            raise Ended(self, "wrote something that is not a message") from failure
        if not isinstance(message, dict):
            raise Ended(self, "wrote something that is not a message")
        return message

    def send(self, line: bytes, deadline: float) -> None:
        """Raises Ended, Late."""
        rest = memoryview(line)
        while rest:
            self._await(self._stdin, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._stdin, rest[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as failure:
                raise Ended(self, "closed its input") from failure

    def receive(self, deadline: float) -> bytes:
        """Return the next line, with its end. Raises Ended, Late."""
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > MAX_LINE_BYTES:
                raise Ended(self, f"wrote more than {MAX_LINE_BYTES} bytes at once")
            self._await(self._stdout, select.POLLIN, deadline)
            try:
                chunk = os.read(self._stdout, CHUNK_BYTES)
            except BlockingIOError:
                continue
            if not chunk:
                raise Ended(self, "ended")
            self._read += chunk
        line = bytes(self._read[: end + 1])
        del self._read[: end + 1]
        return line

    @staticmethod
    def _await(descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not poll.poll(seconds * 1000):
            raise DeadlineExceeded

    def close(self) -> ExecResult:
        """End the process. Returns how it ended."""
        self._process.kill()
        return self._process.wait(timeout=10)
