"""Channel to the parent process: one JSON value per line, over the original standard input and output."""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from typing import Any


class Control:
    """Channel to the host. Redirects standard input and output to the null device, so that prints of the code are not
    taken for an answer.
    """

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        redirect(null, null, null)
        os.close(null)
        self.send({"ready": True})

    def send(self, message: dict[str, object]) -> None:
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._replies, data) :]

    def receive(self) -> Any:
        """Return the next message, or None at the end."""
        line = self._requests.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._requests.close()
        os.close(self._replies)


def redirect(stdin: int, stdout: int, stderr: int) -> None:
    """Make these file descriptors the standard ones, with fresh text streams over them."""
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
