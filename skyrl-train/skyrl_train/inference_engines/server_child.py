"""Servers as child processes that never outlive this process. Independent of engines."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from skyrl_gym.waits import waiting
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import WorkerError
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.utils.process_log import read_log_tail

_POLL_SECONDS = 0.2
_END_SECONDS = 10.0


class ServerChild:
    """HTTP server process on a free loopback port, with a log file, in a process group led by a guard.

    Args:
        name: name of the server in errors.
        command: `--port` is added to it; it must listen on 127.0.0.1.
        environment: variables added to the environment of this process.
    """

    def __init__(self, name: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str]):
        self._name = name
        self.log_file = log_file
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        guard = [sys.executable, "-m", "skyrl_train.inference_engines.owner_guard", str(os.getpid())]
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                [*guard, *command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,  # a process group, so that all its processes can be killed
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise WorkerError with the end of the log if the server has exited."""
        if self._process.poll() is not None:
            raise WorkerError(f"{self._name} exited with status {self._process.returncode}\n{self._log()}")

    def wait_until_ready(self, path: str, timeout_seconds: float, timeout_setting: str = "") -> None:
        """Wait until a path returns status 200. Otherwise the server is killed.

        Args:
            timeout_setting: name of the timeout's setting, for the error.

        Raises:
            WorkerError: the server exited or was not ready in time; with the end of its log.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            with waiting(f"{self._name} to be ready", on=self.url, deadline=timeout_seconds):
                while not self._is_ready(path):
                    self.check()
                    if time.monotonic() > deadline:
                        setting = f" ({timeout_setting})" if timeout_setting else ""
                        late = f"{self._name} was not ready within {timeout_seconds:g} s{setting}"
                        raise WorkerError(f"{late}{write_explanation(late)}\n{self._log()}")
                    time.sleep(_POLL_SECONDS)
        except BaseException:  # also on KeyboardInterrupt
            self.end()
            raise

    def end(self, grace_seconds: float = 0.0) -> None:
        """Stop the server and its descendants.

        Args:
            grace_seconds: seconds between SIGTERM and SIGKILL; 0: kill immediately.
        """
        if grace_seconds:
            self._send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._send_signal(signal.SIGKILL)  # the guard may exit before its command
        self._process.wait(_END_SECONDS)

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _is_ready(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _log(self) -> str:
        return f"--- end of {self.log_file}:\n{read_log_tail(self.log_file)}"
