"""Servers as child processes that do not outlive this one, however this one ends. Knows no engine."""

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
    """Command that serves HTTP on a free port of loopback, with a log file and a process group, which a guard leads.

    Args:
        name: of the server, in errors.
        command: `--port` is added to it; it must listen on 127.0.0.1.
        environment: variables added to those of this process.
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
                start_new_session=True,  # a process group, so that all of it can be ended
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise WorkerError, with the end of the log, if the server has ended."""
        if self._process.poll() is not None:
            raise WorkerError(f"{self._name} ended with status {self._process.returncode}\n{self._log()}")

    def wait_until_ready(self, path: str, timeout_seconds: float, timeout_setting: str = "") -> None:
        """Wait until a path answers 200. A server that does not is ended.

        Args:
            timeout_setting: setting that the time comes from, for the error.

        Raises:
            WorkerError: the server ended or was not ready in time; with the end of its log.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            with waiting(f"{self._name} to be ready", on=self.url, deadline=timeout_seconds):
                while not self._answers(path):
                    self.check()
                    if time.monotonic() > deadline:
                        setting = f" ({timeout_setting})" if timeout_setting else ""
                        late = f"{self._name} was not ready within {timeout_seconds:g} s{setting}"
                        raise WorkerError(f"{late}{write_explanation(late)}\n{self._log()}")
                    time.sleep(_POLL_SECONDS)
        except BaseException:  # a KeyboardInterrupt ends it too
            self.end()
            raise

    def end(self, grace_seconds: float = 0.0) -> None:
        """End the server and all that it started.

        Args:
            grace_seconds: time between asking (SIGTERM) and killing; 0: kill at once.
        """
        if grace_seconds:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._signal(signal.SIGKILL)  # the guard may be gone before what it guarded
        self._process.wait(_END_SECONDS)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _log(self) -> str:
        return f"--- end of {self.log_file}:\n{read_log_tail(self.log_file)}"
