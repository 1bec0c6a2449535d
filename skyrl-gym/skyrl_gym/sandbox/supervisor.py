"""Program that runs one command of a `ProcessSandbox` and ends with it: python -I -S -X utf8 supervisor.py COMMAND...

It is the subreaper (PR_SET_CHILD_SUBREAPER of prctl(2)) of all that the command starts: a process whose parent exits
becomes a child of this one, whatever its session and environment, and cannot exit unnoticed. SIGTERM kills all of
them, as does the end of the command or of the sandbox's owner; SIGINT goes to the command. Ends as the command did.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main() -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if prctl(option, value, 0, 0, 0):
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    with open("/proc/self/environ", "rb") as file:  # `os.environ` may have a locale that Python added
        environment = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    command = os.posix_spawn(sys.argv[1], sys.argv[1:], environment, setsid=True, setsigmask=())
    for descriptor in range(3):  # so that only the command holds its pipes
        os.close(descriptor)
    statuses: dict[int, int] = {}
    _wait(command, statuses)
    while _reap(statuses):
        _kill_children()
        time.sleep(0.001)
    _exit(statuses[command])


def _wait(command: int, statuses: dict[int, int]) -> None:
    """Wait until the command exits or is to be killed."""
    while command not in statuses:
        received = signal.sigwait(HANDLED)
        if received == signal.SIGTERM:
            return
        if received == signal.SIGINT:
            os.kill(command, signal.SIGINT)  # not reaped yet, so the number is still its own
        else:
            _reap(statuses)


def _reap(statuses: dict[int, int]) -> bool:
    """Add the wait statuses of the children that have exited. False once no child is left."""
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return True
            statuses[child] = status
    return False


def _kill_children() -> None:
    """Send SIGKILL to the process groups of the children; their own children are children of this process next."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            _, parent, group = file.read().rpartition(b")")[2].split()[:3]
            if int(parent) == os.getpid():  # only this process reaps it, so the number is still its own
                os.killpg(int(group), signal.SIGKILL)


def _exit(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # no second core of one crash, see `rlimits`
        with suppress(OSError):  # SIGKILL has no other
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {os.WTERMSIG(status)})
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
