"""An SGLang server as a child process that does not outlive this one, however this one ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from skyrl_train.errors import WorkerError
from skyrl_train.utils.process_log import log_tail

_POLL_SECONDS = 0.2
_END_SECONDS = 10.0


class ServerChild:
    """A server with these options on loopback, logging to a file.

    Args:
        timeout_seconds: the longest that the start may take
        timeout_setting: the setting it comes from

    Raises:
        WorkerError: it ended or was not ready in time; with the end of its log.
    """

    def __init__(
        self,
        options: Sequence[str],
        log_file: Path,
        *,
        environment: Mapping[str, str],
        ready_path: str,
        timeout_seconds: float,
        timeout_setting: str,
    ):
        self._log_file = log_file
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        guard = [sys.executable, "-m", f"{__package__}.guard", str(os.getpid())]
        server = [sys.executable, "-m", "sglang.launch_server"]
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                [*guard, *server, *options, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,  # a process group, so that all of it can be ended
            )
        try:
            self._wait(ready_path, timeout_seconds, timeout_setting)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise WorkerError, with the end of the log, if the server has ended."""
        if self._process.poll() is not None:
            raise WorkerError(f"the SGLang server ended with status {self._process.returncode}\n{self._log()}")

    def end(self) -> None:
        """End the server and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_SECONDS)

    def _wait(self, ready_path: str, timeout_seconds: float, timeout_setting: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.check()
            try:
                if httpx.get(self.url + ready_path, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"the SGLang server was not ready within {timeout_seconds:g} s ({timeout_setting})\n{self._log()}"
                )
            time.sleep(_POLL_SECONDS)

    def _log(self) -> str:
        return f"--- end of {self._log_file}:\n{log_tail(self._log_file)}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
