"""Renewal of this process's leases by a thread, and cleanup after it by a small process that outlives it.

The thread needs no event loop, so a task that blocks one costs no runtime. The watcher waits until this process exits,
by any signal, and then removes its leftover runtimes.
"""

import os
import select
import sys
import threading
from contextlib import suppress

from skyrl_agent.runtimes.leases import Lease

BEATS_PER_LEASE = 4
LONGEST_PAUSE_SECONDS = 30.0


class LeaseRenewal:
    """Lease renewal of one process."""

    def __init__(self) -> None:
        self._held: set[Lease] = set()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._watcher: tuple[int, int] | None = None
        """Process id of the watcher, and a descriptor that becomes readable when it ends."""

    def start_watcher(self) -> None:
        """Start the watcher process, unless it runs. Call it before a resource that needs cleanup exists."""
        with self._lock:
            if self._watcher is not None:
                pid, descriptor = self._watcher
                # A pidfd and not the bare process id, which the system may have given to another process since.
                if not _is_readable(descriptor):
                    return
                os.close(descriptor)
                with suppress(ChildProcessError):
                    # Reaps the watcher that ended, which would stay a zombie. Other code may have reaped it already.
                    os.waitpid(pid, os.WNOHANG)
            pid = start_watcher()
            self._watcher = pid, os.pidfd_open(pid)

    def hold(self, lease: Lease) -> None:
        """Renew the lease until it is dropped or this process ends."""
        with self._lock:
            self._held.add(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skyrl-agent-heartbeat", daemon=True)
                self._thread.start()
        # Wakes the thread, whose current pause may be longer than this lease lasts.
        self._changed.set()

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._held.discard(lease)

    def _run(self) -> None:
        while True:
            # Cleared before the leases are read: a `hold` after the read sets it again and ends the wait below.
            self._changed.clear()
            with self._lock:
                # Copied, so that leases are renewed without the lock: `hold` and `drop` must not wait for a slow disk.
                held = list(self._held)
            if held:
                self.start_watcher()
            for lease in held:
                with suppress(OSError):  # the next heartbeat may succeed
                    lease.renew()
            pause = min((lease.seconds / BEATS_PER_LEASE for lease in held), default=LONGEST_PAUSE_SECONDS)
            self._changed.wait(min(pause, LONGEST_PAUSE_SECONDS))


def start_watcher() -> int:
    """Start the process that removes this process's leftovers: in a new session, without signals, input or output."""
    command = [sys.executable, "-m", "skyrl_agent.services.gc", "--watch", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    silence = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)]
    silence += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
    return os.posix_spawn(sys.executable, command, environment, file_actions=silence, setsid=True)


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()  # `select` does not support descriptors above 1024
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


heart = LeaseRenewal()


def _reset_after_fork() -> None:
    """Reset state in a forked child, which inherits neither threads nor leases."""
    global heart
    heart = LeaseRenewal()


os.register_at_fork(after_in_child=_reset_after_fork)
