"""Engine process: start by the API, and exit together with it.

No parent-death signal of the system (PR_SET_PDEATHSIG): that one comes when the thread ends that started the child.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tx.tinker.config import EngineConfig

WRONG_SETTINGS = 78
"""Exit status (EX_CONFIG) for settings with which no restart can succeed."""
ORPHANED = 3
FROM_STDIN = "-"
"""Argument in place of a channel's address: the engine imports its modules and then waits for a line with the
address.
"""
STANDING_BY = "standing by"
"""Line that the engine prints when it waits for the address."""

_SECRETS = {"database_url", "api_keys_file"}
"""Settings that the engine has no use for, and that a command line would show to everybody on the machine."""
_POLL_SECONDS = 0.5


def build_engine_command(config: EngineConfig, address: str) -> list[str]:
    """Return the command line of an engine owned by this process, for a channel's address or `FROM_STDIN`."""
    settings = config.model_dump_json(exclude=_SECRETS)
    module = "tx.tinker.engine.main"
    return [sys.executable, "-m", module, "--config", settings, "--channel", address, "--parent", str(os.getpid())]


def set_process_name(name: str) -> None:
    """Set the process name that `ps` and `top` show, where supported."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def run_at_low_priority(work: Callable[[], None]) -> None:
    """Run in a thread of the lowest priority, where priorities are per thread (Linux). Raising a priority again needs a
    privilege.
    """

    def give_way() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

    with ThreadPoolExecutor(1, initializer=give_way) as thread:
        thread.submit(work).result()


def call_when_parent_exits(parent: int, then: Callable[[], None]) -> None:
    """Call `then` in a thread when the parent process exits, even by kill -9; immediately if it has exited."""

    def watch() -> None:
        _wait_for_exit(parent)
        then()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _wait_for_exit(parent: int) -> None:
    # Without pidfd_open (macOS), on refusal, or after the process exited, the loop below polls instead.
    with suppress(OSError, AttributeError), os.fdopen(os.pidfd_open(parent)) as ended:
        # Asked after the open: the number of a process that is still the parent cannot have passed to another one.
        if os.getppid() == parent:
            select.select([ended], [], [])
        return
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
