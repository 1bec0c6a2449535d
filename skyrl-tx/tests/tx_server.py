"""A real server as a process, which tests may kill and start again at the same address with the same folders."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

START_SECONDS = 120.0
"""Busy machines."""
STOP_SECONDS = 60.0
_ADDRESS = re.compile(r"^tx listens on (http\S+)", re.MULTILINE)


class ServerProcess:
    """`python -m tx.tinker.api`, as a context manager: listening inside it, gone after it.

    Args:
        folder: of its own; gets `server.log`, `state`, `checkpoints` and `keys`
        options: of the command line
        tenants: with names it has keys, of `key(name)`; without, everybody is `local`
        port: the same one after a new start; 0 is any, and another one each time
        program: what Python runs
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        tenants: Sequence[str] = (),
        port: int | None = None,
        program: Sequence[str] = ("-m", "tx.tinker.api"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state, self.checkpoints = folder, folder / "state", folder / "checkpoints"
        self.log = folder / "server.log"
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        self._keys = {name: f"tml-{name}-{secrets.token_hex(4)}" for name in tenants}
        argv = [sys.executable, *program, "--port", str(port), "--state-dir", str(self.state)]
        argv += ["--checkpoints-base", str(self.checkpoints), *options]
        if tenants:
            (folder / "keys").write_text("".join(f"{name} {key}\n" for name, key in self._keys.items()))
            argv += ["--api-keys-file", str(folder / "keys")]
        self._argv = argv
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> "ServerProcess":
        self.start()
        try:
            self.wait_until_listening()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.is_running:
                self.stop()
        finally:
            self.kill()
            for child in self.children():
                child.kill()

    def key(self, tenant: str) -> str:
        return self._keys[tenant]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # ---- life

    def start(self) -> None:
        """Does not wait for it."""
        assert not self.is_running
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                if found := _ADDRESS.search(log.read().decode(errors="replace")):
                    self.url = found[1]
                    return
            assert self.is_running, f"the server ended:\n{self.tail()}"
            time.sleep(0.05)
        raise AssertionError(f"no server after {START_SECONDS} s:\n{self.tail()}")

    def kill(self) -> None:
        """The API process alone, with SIGKILL; its engine is to notice."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_SECONDS)

    def kill_engine(self) -> bool:
        """Kill the engine process. Returns True if there was one."""
        engines = self.engines()
        for engine in engines:
            try:
                engine.kill()
            except psutil.NoSuchProcess:
                engines.remove(engine)
        return bool(engines)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Asks it to end. Returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal_number)
        return self.process.wait(STOP_SECONDS)

    # ---- a look at it

    def engines(self) -> list[psutil.Process]:
        """Those at work, not the one that stands by."""
        return [child for child in self.children() if "-" not in child.cmdline() or child.name() == "tx-engine"]

    def children(self) -> list[psutil.Process]:
        """Engines with this server's folders, whosever children they are by now."""
        found = []
        for process in psutil.process_iter():
            try:
                argv = process.cmdline()
                if "tx.tinker.engine.main" in argv and any(str(self.state) in part for part in argv):
                    found.append(process)
            except psutil.Error:  # exited, or not accessible
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def wait_until_no_engine(self, seconds: float = 15.0) -> list[psutil.Process]:
        """Nor one that stands by. Returns what is still there then."""
        deadline = time.monotonic() + seconds
        while (engines := self.children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return engines

    def tail(self, num_bytes: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace") if self.log.exists() else ""


def free_port() -> int:
    """Below the ports that the system gives to clients: while the server is down, one that tries to connect to such a
    port may be given that very port, and then talks to itself."""
    for _ in range(100):
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 30000")
