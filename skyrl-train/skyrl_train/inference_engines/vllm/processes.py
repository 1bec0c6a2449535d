"""The processes that vLLM started, and their certain end."""

import psutil

_PATIENCE_SECONDS = 10.0


def children_of_this_process() -> list[psutil.Process]:
    """With their children."""
    return psutil.Process().children(recursive=True)


def end_processes(processes: list[psutil.Process]) -> None:
    """Kills those that still run, and waits for them."""
    for process in processes:
        try:
            process.kill()  # psutil does not take another process with this number for it
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_PATIENCE_SECONDS)
