"""How SGLang is started and ended, without SGLang."""

import os
import signal
import subprocess
import sys
import time

import pytest

from skyrl_train.inference_engines.sglang.arguments import command_line


def test_flags_are_written_as_the_launcher_reads_them() -> None:
    arguments = {"tp_size": 2, "enable_lora": True, "disable_radix_cache": False, "lora_paths": ["a"], "revision": None}
    assert command_line(arguments) == ["--tp-size", "2", "--enable-lora", "--lora-paths", "a"]


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_guarded_command_and_its_children_end_with_an_owner_that_is_killed() -> None:
    """The owner starts the guard, the guard a shell, the shell two sleepers; then kill -9 of the owner."""
    script = (
        "import os, subprocess, sys, time\n"
        "guard = [sys.executable, '-m', 'skyrl_train.inference_engines.sglang.guard', str(os.getpid())]\n"
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
        deadline = time.monotonic() + 60
        while _is_there(group) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _is_there(group)
    finally:
        owner.kill()
        if _is_there(group):
            os.killpg(group, signal.SIGKILL)
