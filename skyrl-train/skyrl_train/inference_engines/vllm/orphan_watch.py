"""Watch that ends vLLM's processes with their owner process, even if it is killed.

After `kill -9` of the parent, vLLM's EngineCore and workers would survive. Every worker imports the worker extension,
which calls `start_owner_watch`; a worker without owner kills its parent (the EngineCore) and itself.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time

from skyrl_train.inference_engines.vllm.arguments import OWNER_VARIABLE

_INTERVAL_SECONDS = 0.5
_started = threading.Event()


def start_owner_watch() -> None:
    """Start the watch, once per process. No effect in a process not started by multiprocessing."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or _started.is_set() or not os.path.exists("/proc/self/stat"):
        return
    _started.set()
    owner = int(os.environ.get(OWNER_VARIABLE, parent.pid))
    arguments = (owner, _start_time(owner), parent.pid)
    threading.Thread(target=_run_watch, args=arguments, name="orphan-watch", daemon=True).start()


def _run_watch(owner: int, started: str | None, parent: int) -> None:
    while os.getppid() == parent and started is not None and _start_time(owner) == started:
        time.sleep(_INTERVAL_SECONDS)
    if parent != owner and os.getppid() == parent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os._exit(1)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, which distinguishes it from a later one with the same id; None if it has
    exited.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]
