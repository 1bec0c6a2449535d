"""kill -9 of a process that owns runtimes: what is left, and for how long. Real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes import RuntimeSpec, make_runtime, remote

from .runtime_places import LIMITS, long_sleep, processes_with, wait_until_true

pytestmark = pytest.mark.process

OWNER = """
import asyncio, sys
from skyrl_agent.runtimes import Limits, RuntimeSpec, make_runtime

async def main(sleep, lease_seconds):
    limits = Limits(wall_seconds=600.0)
    runtimes = [make_runtime(RuntimeSpec(kind=kind, limits=limits, lease_seconds=lease_seconds)) for kind in KINDS]
    for runtime in runtimes:
        await runtime.start()
    running = [asyncio.create_task(runtime.exec(f"setsid {sleep} & {sleep}")) for runtime in runtimes]
    print("ready", flush=True)
    try:
        await asyncio.gather(*running)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

asyncio.run(main(sys.stdin.readline().strip(), float(sys.argv[1])))
"""


class Owner:
    """A process with runtimes, in each of which two processes sleep."""

    def __init__(self, folder: Path, kinds: tuple[str, ...] = ("local",), lease_seconds: float = 60.0, **env: str):
        self.sleep = long_sleep()
        self.places, self.leases = folder / "of-owner", folder / "leases"
        self.places.mkdir()
        self.env = {**os.environ, "TMPDIR": str(self.places), "SKYRL_AGENT_LEASES": str(self.leases), **env}
        code = OWNER.replace("KINDS", repr(kinds))
        command = [sys.executable, "-c", code, str(lease_seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=self.env, text=True, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        with self.process.stdin as stdin:
            stdin.write(self.sleep)
        assert self.process.stdout.readline() == "ready\n"
        # The programs themselves: their sandboxes, whose command lines hold the same words, are then complete, and end
        # with this process. One that had only begun to start would not.
        assert wait_until_true(lambda: len(processes_with(self.sleep, alone=True)) >= 2 * len(kinds))

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)

    def watchers(self) -> list[int]:
        return processes_with(f"--watch {self.process.pid}")

    def left(self) -> list[object]:
        return [*os.listdir(self.places), *os.listdir(self.leases), *processes_with(self.sleep)]

    def gc(self, *options: str) -> dict:
        command = [sys.executable, "-m", "skyrl_agent.services.gc", "--json", *options]
        return json.loads(subprocess.run(command, env=self.env, capture_output=True, check=True, timeout=60).stdout)


@contextmanager
def owner(*arguments, **settings) -> Iterator[Owner]:
    owning = Owner(*arguments, **settings)
    try:
        yield owning
    finally:
        owning.process.kill()
        owning.process.wait(60)
        assert owning.process.stdout is not None
        owning.process.stdout.close()
        assert wait_until_true(lambda: not owning.left() and not owning.watchers()), owning.left()


@pytest.mark.parametrize(
    "kinds, env", [(("local", "local"), {}), (("auto",), {"SKYRL_GYM_SANDBOX": "process"})], ids=["local", "process"]
)
@pytest.mark.usefixtures("needs_sandbox")
def test_sigkill_of_owner_leaves_nothing(tmp_path, kinds, env):
    with owner(tmp_path, kinds, **env) as owning:
        assert len(owning.watchers()) == 1
        assert len(os.listdir(owning.places)) == len(os.listdir(owning.leases)) == len(kinds)
        owning.end()
        assert wait_until_true(lambda: not owning.left()), owning.left()
        assert wait_until_true(lambda: not owning.watchers())


@pytest.mark.slow
def test_gc_removes_leftovers_of_killed_watcher(tmp_path):
    with owner(tmp_path) as owning:
        (watcher,) = owning.watchers()
        assert owning.gc("--remove")["removed"] == []  # its owner lives
        os.kill(owning.process.pid, signal.SIGSTOP)  # so that it does not start another
        os.kill(watcher, signal.SIGKILL)
        owning.end()
        assert wait_until_true(
            lambda: not processes_with(owning.sleep)
        )  # these end with their owner, without anyone's help
        assert len(owning.left()) == 2
        (row,) = owning.gc()["leases"]
        assert row["left_behind"] == f"its owner, process {owning.process.pid}, has ended"
        assert owning.gc("--remove")["removed"] == [row["id"]]
        assert owning.left() == []


@pytest.mark.usefixtures("needs_sandbox")
def test_killed_watcher_is_replaced(tmp_path):
    with owner(tmp_path, lease_seconds=1.0) as owning:
        (watcher,) = owning.watchers()
        os.kill(watcher, signal.SIGKILL)
        assert wait_until_true(lambda: owning.watchers() not in ([], [watcher]))


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
def test_runtime_of_suspended_owner_ends_with_lease(tmp_path):
    with owner(tmp_path, lease_seconds=1.0) as owning:
        os.kill(owning.process.pid, signal.SIGSTOP)
        assert wait_until_true(lambda: owning.gc("--remove") and not processes_with(owning.sleep) and not owning.left())
        os.kill(owning.process.pid, signal.SIGCONT)
        assert owning.process.stdout is not None
        assert owning.process.stdout.readline().startswith("InfraError")


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """`python -m skyrl_agent.services.runtime`, when it answers; and its address."""
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "skyrl_agent.services.runtime", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


@pytest.fixture
def impatient(monkeypatch):
    """Clients that soon give up a server."""
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(remote, "RETRY_SECONDS", 1.0)
    monkeypatch.setattr(remote, "CANCEL_SECONDS", 1.0)


@pytest.mark.usefixtures("needs_sandbox")
async def test_killed_server_leaves_nothing_and_clients_get_error(tmp_path, impatient):
    folder, sleep = tmp_path / "of-server", long_sleep()
    with server(folder) as (process, url):
        runtime = make_runtime(RuntimeSpec(url=url, limits=LIMITS))
        await runtime.start()
        running = asyncio.create_task(runtime.exec(sleep))
        while not processes_with(sleep):
            await asyncio.sleep(0.02)
        process.kill()
        process.wait(60)
        with pytest.raises(InfraError, match="failed for"):
            await running
        await runtime.close()
        assert wait_until_true(lambda: not processes_with(sleep) and not os.listdir(folder)), os.listdir(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
async def test_sigterm_of_server_closes_runtimes(tmp_path, impatient):
    folder = tmp_path / "of-server"
    with server(folder) as (process, url):
        runtime = make_runtime(RuntimeSpec(url=url, limits=LIMITS))
        await runtime.start()
        assert os.listdir(folder)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert not os.listdir(folder)
        await runtime.close()
