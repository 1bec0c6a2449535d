"""Many concurrent commands, and their end when the host process is gone."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_gym.sandbox import Limits, make_sandbox

from ..sandboxed import processes_with

WORK = "import sys; x = [i * i for i in range(50_000)]; print(sum(x) % 1000 + int(sys.argv[1]))"
HOST = """
import sys, time, threading
from skyrl_gym.sandbox import make_sandbox
sandbox = make_sandbox("local")
sandbox.start()
talking = sandbox.popen(["sleep", "1000"])
threading.Thread(target=sandbox.exec, args=(["sh", "-c", "setsid sleep 1000 & sleep 1000"],), daemon=True).start()
time.sleep(0.5)
print(sandbox._workspace.root, flush=True)
END
"""


def in_a_sandbox(number: int) -> tuple[str, str]:
    with make_sandbox("local", limits=Limits(wall_seconds=60.0)) as sandbox:
        result = sandbox.exec([sandbox.python, "-I", "-S", "-c", WORK, str(number)])
        return result.outcome, result.stdout


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_two_hundred_commands_at_once_all_finish(needs_local):
    in_a_sandbox(0)
    before = descriptors()
    expected = sum(i * i for i in range(50_000)) % 1000
    with ThreadPoolExecutor(200) as pool:
        results = list(pool.map(in_a_sandbox, range(200)))
    assert results == [("exited", f"{expected + number}\n") for number in range(200)]
    assert descriptors() <= before


def test_hundred_commands_leak_no_descriptor(needs_local):
    with make_sandbox("local") as sandbox:
        sandbox.exec(["true"])
        sandbox.popen(["true"]).wait()
        before = descriptors()
        for _ in range(20):
            sandbox.exec(["true"])
            sandbox.exec(["a\0b"])
        assert descriptors() <= before


@pytest.mark.parametrize(
    "end",
    ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()", "raise KeyError", "time.sleep(1000)"],
)
def test_commands_end_with_parent_process(needs_local, end):
    host = subprocess.Popen(
        [sys.executable, "-c", HOST.replace("END", end)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with host:
        try:
            assert host.stdout is not None
            folder = host.stdout.readline().strip()
            assert "skyrl-sandbox" in folder
            deadline = time.monotonic() + 60
            while "sleep" in end and len(processes_with(os.path.basename(folder), "mountinfo")) < 5:
                assert time.monotonic() < deadline, "the commands do not start"
                time.sleep(0.02)
            if "sleep" not in end:
                host.wait(timeout=30)
        finally:
            host.kill()
    deadline = time.monotonic() + 10
    while processes_with(os.path.basename(folder), "mountinfo") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(os.path.basename(folder), "mountinfo") == []
    if "kill" in end or "sleep" in end:
        assert os.path.isdir(folder)  # nobody was left to delete it: an hour later, any other sandbox does
        subprocess.run(["rm", "-rf", folder], check=True)
    else:
        assert not os.path.exists(folder)
