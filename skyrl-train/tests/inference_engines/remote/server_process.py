"""A real vLLM server on loopback, in a process group of its own, ended by its number."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

KEY = "correct-horse-battery-staple"
_START_SECONDS = 280.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server binds itself to the first core, and two share it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A command that serves HTTP on a port.

    Args:
        command: without the port, which is put behind `--port`.
        ready: a path that answers 200 when it is up.
    """

    def __init__(self, command: list[str], log_file: Path, *, environment: dict[str, str], ready: str = "/health"):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log_file
        self._ready = ready
        with log_file.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait(self, seconds: float = _START_SECONDS) -> "ServerProcess":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}{self._ready}", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        self.end()
        raise RuntimeError(f"the server did not start within {seconds:g} s:\n{self.log_file.read_text()[-3000:]}")

    def end(self) -> None:
        """The whole tree: children of a server live on without it."""
        for what in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, what)
            except ProcessLookupError:
                break
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait(10)


def vllm_server(model: str, log_file: Path, key_file: Path, *options: str) -> ServerProcess:
    """Serves `model` in float32, started as our documentation says."""
    command = [
        *(sys.executable, "-m", "skyrl_train.entrypoints.serve_vllm", "--api-key-file", str(key_file)),
        *("--model", model, "--dtype", "float32", "--max-num-seqs", "64"),
        *("--enforce-eager", "--uvicorn-log-level", "warning", *options),
    ]
    return ServerProcess(command, log_file, environment=_ENVIRONMENT)
