"""Servers as children: started, awaited, ended with all that they started, also by the death of their owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.server_child import ServerChild


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _ends(group: int) -> bool:
    """Wait until the system has removed the processes of a group that was killed."""
    deadline = time.monotonic() + 60
    while _is_there(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not _is_there(group)


@pytest.mark.slow
def test_guarded_process_tree_exits_when_owner_is_killed() -> None:
    """The owner starts the guard, the guard a shell, the shell two sleepers; then kill -9 of the owner."""
    script = (
        "import os, subprocess, sys, time\n"
        "guard = [sys.executable, '-m', 'skyrl_train.inference_engines.owner_guard', str(os.getpid())]\n"
        "command = ['sh', '-c', 'sleep 300 & sleep 300']\n"
        "print(subprocess.Popen([*guard, *command], start_new_session=True, stdout=2).pid, flush=True)\n"
        "time.sleep(300)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    try:
        time.sleep(1)
        assert _is_there(group)
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
        assert _ends(group)
    finally:
        owner.kill()
        if _is_there(group):
            os.killpg(group, signal.SIGKILL)


SERVER = """
import http.server, sys
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.mark.slow
def test_server_responds_until_stopped(tmp_path: Path) -> None:
    child = ServerChild("the server", [sys.executable, "-c", SERVER], tmp_path / "log", {})
    child.wait_until_ready("/", 60)
    child.check()
    child.end(grace_seconds=5)
    assert _ends(child.pid)
    with pytest.raises(WorkerError, match=r"(?s)the server exited with status .*serving"):
        child.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, seconds, message",
    [
        ("import sys; print('no model'); sys.exit(3)", 60, r"(?s)exited with status 3\n.*no model"),
        (
            "import time; print('loading', flush=True); time.sleep(99)",
            2,
            r"a\.b",
        ),
    ],
)
def test_failed_server_start_error_contains_log(tmp_path: Path, source: str, seconds: float, message: str) -> None:
    child = ServerChild("the server", [sys.executable, "-c", source], tmp_path / "log", {})
    with pytest.raises(WorkerError, match=message):
        child.wait_until_ready("/", seconds, "a.b")
    assert _ends(child.pid)
