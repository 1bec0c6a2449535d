"""Commands with limits but without isolation: they have access to the host's files and network.

For trusted code, on a machine without bubblewrap and Docker; never chosen automatically. A command can leave processes
behind on purpose (with a new session and an empty environment).
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from skyrl_gym.sandbox.base import Limits, Outcome
from skyrl_gym.sandbox.command import Launch, as_bytes
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, PATH, rlimits, tool
from skyrl_gym.sandbox.usage import ProcFolder
from skyrl_gym.sandbox.workspace import Workspace

MARK = "SKYRL_GYM_COMMAND"
"""Environment variable by which processes that left the process group are found again."""
KILL_ROUNDS = 1000


class ProcessSandbox(HostSandbox[Workspace]):
    """A `Sandbox` without isolation, for trusted code only. Made by `make_sandbox("process")`."""

    python = sys.executable

    def _make_workspace(self) -> Workspace:
        return Workspace()

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        workspace = self._started()
        workspace.open()
        mark = uuid.uuid4().hex
        surroundings = {
            **ENVIRONMENT,
            "PATH": PATH,
            "HOME": workspace.files,
            "TMPDIR": workspace.tmp,
            **(env or {}),
            MARK: mark,
        }
        # The number of processes is not limited here: the kernel would count all that this user has.
        argv = [tool("prlimit"), *rlimits(limits), "--", *map(as_bytes, command)]
        return Launch(argv, ProcessGroup(mark, workspace), surroundings, workspace.files)


class ProcessGroup:
    """The processes of one command: its group, and whatever still carries its mark."""

    def __init__(self, mark: str, workspace: Workspace):
        self._mark = f"{MARK}={mark}"
        self._workspace = workspace
        self._proc = ProcFolder("/proc")
        self._unreadable: dict[str, list[str]] = {}
        """Processes whose environment could not be read -> its addresses."""

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._kill_marked()

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        process.send_signal(signal.SIGINT)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        marked = self._marked()
        if len(marked) > limits.processes:  # no outcome has that name: each of them takes memory
            return "memory"
        return self._proc.over_limit(marked, limits, self._workspace)

    def returncode(self, status: int) -> int | None:
        self._kill_marked()
        return status

    def close(self) -> None:
        self._proc.close()

    def _marked(self) -> list[str]:
        return [process for process in self._proc.processes() if self._owner(process) == "command"]

    def _owner(self, process: str) -> Literal["command", "other", "unknown", "gone"]:
        environment = self._proc.text(f"{process}/environ")
        if environment:
            return "command" if self._mark in environment else "other"
        fields = self._proc.text(f"{process}/stat").rpartition(")")[2].split()
        if not fields:
            return "gone"
        # proc_pid_stat(5): these fields begin with the third; 50 and 51 are start and end of the environment.
        addresses = fields[50 - 3 : 52 - 3]
        if addresses == ["0", "0"]:  # `execve` replaces it; or a kernel thread or a zombie, without executable
            return "unknown" if self._proc.has_executable(process) else "other"
        # If `execve` ended between open and read, the text is empty, but the next one is not.
        seen_before, self._unreadable[process] = self._unreadable.get(process), addresses
        return "other" if addresses[0] == addresses[1] or addresses == seen_before else "unknown"

    def _kill_marked(self) -> None:
        quiet_rounds = 0
        for _ in range(KILL_ROUNDS):  # a process may start others during the search
            owners = {process: self._owner(process) for process in self._proc.processes()}
            if {"command", "unknown"} & {*owners.values()}:
                quiet_rounds = 0
            # A process that exited after it was listed may have started another one: search once more.
            elif quiet_rounds or "gone" not in owners.values():
                return
            else:
                quiet_rounds += 1
            for process in (process for process, owner in owners.items() if owner == "command"):
                with suppress(OSError):
                    folder = os.open(process, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc.descriptor)
                    try:
                        if self._owner(process) == "command":  # the number is still the same process
                            signal.pidfd_send_signal(folder, signal.SIGKILL)
                    finally:
                        os.close(folder)
            time.sleep(0.001)
