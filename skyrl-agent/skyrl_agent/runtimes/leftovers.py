"""Cleanup of abandoned leases: processes, folders and containers of owners that have exited."""

import fcntl
import logging
import os
import signal
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.container import remove_containers
from skyrl_agent.runtimes.leases import Lease, leases
from skyrl_gym.sandbox.workspace import PREFIX

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
DELETE_SECONDS = 120


def remove_leftovers() -> tuple[list[Lease], dict[str, str]]:
    """Remove all abandoned runtimes. Returns: those removed, and the reasons why others could not be (by lease id)."""
    removed, failed = [], {}
    for lease in leases():
        try:
            if remove(lease):
                removed.append(lease)
        except FileNotFoundError:  # closed or removed concurrently
            continue
        except (InfraError, OSError, subprocess.TimeoutExpired) as error:
            failed[lease.id] = str(error)
            logger.warning("runtime %s is orphaned and could not be removed: %s", lease.id, error)
    return removed, failed


def remove(lease: Lease) -> bool:
    """Remove the runtime of a lease if it is abandoned, and then the lease. Returns False if it is in use or another
    process is removing it. Raises InfraError, OSError, subprocess.TimeoutExpired; FileNotFoundError if it is already
    removed.
    """
    with open(lease.path) as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Read under the lock: if another sweep removed the lease between our open and our lock, the lock is on a
        # deleted file and has no effect; the read then raises FileNotFoundError.
        lease = Lease.read(lease.path)
        if lease.describe_abandonment() is None:
            return False
        if lease.folder:
            _remove_folder(lease.folder)
        if lease.kind in ("docker", "podman"):
            remove_containers(lease)
        # Last: if this process dies before, the lease is still there for the next sweep.
        lease.path.unlink()
    return True


def _remove_folder(folder: str) -> None:
    """Remove a folder and the processes that work in it."""
    if not os.path.basename(folder).startswith(PREFIX):
        raise InfraError(f"{folder} is not a sandbox folder and is kept")
    _stop_processes(folder)
    with suppress(FileNotFoundError):
        about = os.lstat(folder)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            raise InfraError(f"{folder} was not created by this package and is kept")
        # A sandboxed program may have removed the permissions that deletion needs.
        for command in (["chmod", "-R", "u+rwx", "--", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=DELETE_SECONDS, check=False)
    _stop_processes(folder)  # processes started meanwhile: from now on none can start
    if os.path.lexists(folder):
        raise InfraError(f"the sandbox's folder {folder} could not be deleted")


def _stop_processes(folder: str) -> None:
    """Kill processes that refer to the folder by a mount, an argument or an environment variable. (bubblewrap asks the
    kernel to kill its children with the owner, but the owner may exit before that.)
    """
    name, deadline = f"/{os.path.basename(folder)}/".encode(), time.monotonic() + END_SECONDS
    # A list, not a generator: each round kills all matches, until none is left.
    while any([_stop_if(pid, name) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))]):
        if time.monotonic() > deadline:
            raise InfraError(f"processes in {folder} could not be terminated within {END_SECONDS:g} s")
        time.sleep(0.02)


def _stop_if(pid: int, name: bytes) -> bool:
    if pid == os.getpid():
        return False
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)  # first, so that the pid cannot be reused during the check
        try:
            if any(name in Path(f"/proc/{pid}/{file}").read_bytes() for file in ("mountinfo", "cmdline", "environ")):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False
