"""Commands with limits but without isolation: they have access to the host's files and network.

For trusted code, on a machine without bubblewrap and Docker; never chosen automatically.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from skyrl_gym.sandbox import supervisor
from skyrl_gym.sandbox.base import Limits, Outcome
from skyrl_gym.sandbox.command import Launch, as_bytes
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, PATH, rlimits, tool
from skyrl_gym.sandbox.usage import ProcFolder
from skyrl_gym.sandbox.workspace import Workspace

SUPERVISOR = (sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__)


class ProcessSandbox(HostSandbox[Workspace]):
    """A `Sandbox` without isolation, for trusted code only. Made by `make_sandbox("process")`."""

    python = sys.executable

    def _make_workspace(self) -> Workspace:
        return Workspace()

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        workspace = self._started()
        workspace.open()
        surroundings = {
            **ENVIRONMENT,
            "PATH": PATH,
            "HOME": workspace.files,
            "TMPDIR": workspace.tmp,
            **(env or {}),
        }
        # The number of processes is not limited here: the kernel would count all that this user has.
        argv = [*SUPERVISOR, tool("prlimit"), *rlimits(limits), "--", *map(as_bytes, command)]
        return Launch(argv, Supervisor(workspace), surroundings, workspace.files)


class Supervisor:
    """The process between this one and the command, parent of whatever the command leaves behind."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace
        self._proc = ProcFolder("/proc")
        self._killed = False

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        self._killed = True
        os.kill(process.pid, signal.SIGTERM)  # not `send_signal`, which may reap it

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        os.kill(process.pid, signal.SIGINT)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        processes = self._proc.descendants(process.pid) if process.returncode is None else []
        if len(processes) > limits.processes:  # no outcome has that name: each of them takes memory
            return "memory"
        return self._proc.over_limit(processes, limits, self._workspace)

    def returncode(self, status: int) -> int | None:
        return -signal.SIGKILL if self._killed and status == -signal.SIGTERM else status  # killed before the command

    def close(self) -> None:
        self._proc.close()
