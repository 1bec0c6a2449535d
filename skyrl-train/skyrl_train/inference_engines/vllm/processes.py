"""Reliable termination of processes started by vLLM."""

import contextlib

import psutil

_PATIENCE_SECONDS = 10.0


def list_descendants() -> list[psutil.Process]:
    """Return all descendants, without the resource tracker of Python's multiprocessing."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # exited meanwhile
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
    return found


def stop_processes(processes: list[psutil.Process]) -> None:
    """Kill the processes that still run, and wait for them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil detects reused process ids
    psutil.wait_procs(processes, timeout=_PATIENCE_SECONDS)
