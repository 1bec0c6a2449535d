"""Commands isolated by bubblewrap: separate namespaces, no daemon, a few milliseconds.

One `bwrap` per command. Inside, process 1 is a shell that does nothing but wait for the command; when it ends, the
kernel ends whatever else is in the process namespace. Two ways to the same isolation:

- As root, the mounts are made with root's permissions (an interpreter below a closed home folder stays usable) and the
  command runs as an otherwise unused user id, because the kernel does not count the processes of root. Process 1 stays
  root's, as bwrap is: otherwise the kernel may not kill it when bwrap crashes.
- As any other user, everything runs in a user namespace that forbids further ones.
"""

import os
import random
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import Limits, Outcome
from skyrl_gym.sandbox.command import Launch
from skyrl_gym.sandbox.environment import carried
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, PATH, rlimits, tool
from skyrl_gym.sandbox.seccomp import build_seccomp_filter
from skyrl_gym.sandbox.usage import ProcFolder
from skyrl_gym.sandbox.workspace import Workspace

START_SECONDS = 5.0
"""Time that bubblewrap has to report the process it started."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "random", "urandom")
"""Devices in the sandbox. /dev/zero is missing: a shared mapping of it is memory that no limit counts (see
`seccomp`).
"""
INIT = 'exec 3>&2 2>/dev/null; echo 1000 >/proc/self/oom_score_adj; cd /workspace && (exec "$@" 2>&3 3>&-); exit $?'
"""Process 1: first to be chosen if the machine runs out of memory; its own standard error is not the command's."""
USER = 1000
"""User id of commands, where it can be chosen."""
FREE_USERS = range(0x70000000, 0x7F000000)
"""User ids that are not assigned to users (https://systemd.io/UIDS-GIDS/)."""
FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')
EXIT_CODE = re.compile(rb'"exit-code": (\d+)')
PASSWD = b"sandbox:x:%d:%d::/workspace:/bin/sh\n"
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


class LocalSandbox(HostSandbox[Workspace]):
    """A `Sandbox` on this machine, by bubblewrap. Made by `make_sandbox`.

    Args:
        visible: path inside -> path on this machine of further folders, files and sockets. None of them can be changed
            from inside; a socket can be connected to.
        links: path inside -> path inside that it is a symbolic link to, for programs that know a folder by a fixed
            path: nothing can be made below `/` from inside.
    """

    python = sys.executable

    def __init__(
        self,
        limits: Limits | None = None,
        visible: Mapping[str, str] | None = None,
        links: Mapping[str, str] | None = None,
    ):
        super().__init__(limits)
        self._user = _find_spare_user()
        self._links = [part for path, target in (links or {}).items() for part in ("--symlink", target, path)]
        self._visible = [part for pair in (visible or {}).items() for part in _make_bind_arguments(*pair)]

    def _make_workspace(self) -> Workspace:
        return Workspace(self._user)

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        workspace = self._started()
        workspace.open()
        user = self._user or USER
        carriers, command_line = carried(env, command)
        variables = b"".join(b"--setenv\0%s\0%s\0" % (name.encode(), value) for name, value in carriers.items())
        data = [build_seccomp_filter(), PASSWD % (user, user), HOSTS, variables]
        descriptors = [_make_memory_file(content) for content in data]
        status, inner_status = os.pipe()
        argv: list[str | bytes] = [
            *_bwrap(as_root=self._user is not None),
            *("--json-status-fd", str(inner_status)),
            *("--add-seccomp-fd", str(descriptors[0])),
            *("--file", str(descriptors[1]), "/etc/passwd"),
            *("--file", str(descriptors[2]), "/etc/hosts"),
            *("--args", str(descriptors[3])),
            *("--bind", workspace.files, "/workspace"),
            *("--bind", workspace.tmp, "/tmp"),
            *("--bind", workspace.shm, "/dev/shm"),
            *_get_python_arguments(),
            *self._visible,
            *self._links,
            *("--remount-ro", "/dev", "--remount-ro", "/", "--"),
        ]
        argv += ["/bin/sh", "-c", INIT, "sh"]
        if self._user is not None:
            user_id = str(self._user)
            argv += [tool("setpriv"), "--reuid", user_id, "--regid", user_id, "--clear-groups"]
            argv += ["--bounding-set=-all", "--inh-caps=-all", "--"]
        # In a user namespace the shell counts as one of the user's processes.
        processes = limits.processes + (self._user is None)
        argv += [tool("prlimit"), *rlimits(limits, processes), "--", *command_line]
        return Launch(argv, Bubblewrap(status, workspace), {}, "/", [inner_status, *descriptors], self._user)


class Bubblewrap:
    """The walls around one command, seen from outside.

    Args:
        status: where bwrap says, as lines of JSON, which process is number 1 inside and how it ended.
    """

    def __init__(self, status: int, workspace: Workspace):
        os.set_blocking(status, False)
        self._status_file = os.fdopen(status, "rb", buffering=0)
        self._status = b""
        self._workspace = workspace
        self._proc: ProcFolder | None = None

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        # Not bwrap itself: it must outlive process 1 to wait for it, and it ends when all inside is gone.
        first = self._first_process(process, START_SECONDS)
        if first is None:
            process.kill()
            return
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        if not self._open_proc(process, START_SECONDS):
            return
        assert self._proc is not None
        with suppress(ProcessLookupError, FileNotFoundError):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            command = os.open("2", flags, dir_fd=self._proc.descriptor)  # the one process that the shell starts
            try:
                signal.pidfd_send_signal(command, signal.SIGINT)
            finally:
                os.close(command)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        if not self._open_proc(process, 0.0):
            return "workspace" if self._workspace.usage(limits.workspace_bytes) > limits.workspace_bytes else None
        assert self._proc is not None
        return self._proc.over_limit(self._proc.processes(), limits, self._workspace)

    def returncode(self, status: int) -> int | None:
        self._read_status()
        ended = EXIT_CODE.search(self._status)  # there only if the walls stood and process 1 was started
        if ended is None:
            return None
        code = int(ended[1])
        return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code

    def close(self) -> None:
        self._status_file.close()
        if self._proc is not None:
            self._proc.close()
            self._proc = None

    def _first_process(self, process: "subprocess.Popen[bytes]", wait_seconds: float) -> int | None:
        """Return the host's process id of process 1 inside; None before it starts and after it ends."""
        if FIRST_PROCESS.search(self._status) is None:
            if wait_seconds:
                poll = select.poll()
                poll.register(self._status_file, select.POLLIN)
                poll.poll(1000 * wait_seconds)
            self._read_status()
        found = FIRST_PROCESS.search(self._status)
        if found is None:
            return None
        with suppress(OSError), open(f"/proc/{int(found[1])}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            return int(found[1]) if parent == process.pid else None  # the number may be another process's by now
        return None

    def _read_status(self) -> None:
        with suppress(BlockingIOError):
            while chunk := os.read(self._status_file.fileno(), 4096):
                self._status += chunk

    def _open_proc(self, process: "subprocess.Popen[bytes]", wait_seconds: float) -> bool:
        """Open the sandbox's own /proc, which lists its processes and no others. False while it is not mounted."""
        if self._proc is None:
            first = self._first_process(process, wait_seconds)
            if first is None:
                return False
            with suppress(OSError):
                proc = ProcFolder(f"/proc/{first}/root/proc")
                if os.fstat(proc.descriptor).st_dev == os.stat("/proc").st_dev:  # still the machine's: bwrap is at work
                    proc.close()
                else:
                    self._proc = proc
        return self._proc is not None


@cache
def _bwrap(as_root: bool) -> list[str]:
    """Return the part of the command line that is the same for every command. Raises InfraError without bubblewrap."""
    argv = [tool("bwrap"), "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--cap-drop", "ALL"]
    if as_root:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        argv += ["--cap-add", "CAP_SYS_RESOURCE"]  # the shell's: what it says about its end then cannot be taken back
    else:
        argv += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
        if _read_version(argv[0]) >= (0, 8):
            argv += ["--disable-userns"]  # older ones leave it to the filter of system calls alone
    for name, value in ENVIRONMENT.items():
        argv += ["--setenv", name, value]
    argv += ["--setenv", "PATH", PATH]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            argv += ["--ro-bind", folder, folder]
    argv += ["--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM_FILES:
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--perms", "0755", "--tmpfs", "/dev"]
    for name in DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    argv += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        argv += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return argv


def _read_version(bwrap: str) -> tuple[int, ...]:
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return tuple(int(number) for number in re.findall(r"\d+", said))


@cache
def _get_python_arguments() -> list[str]:
    """Return arguments that make this interpreter visible, below folders that are otherwise empty."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.base_prefix)}
    executable = sys.executable
    while executable:  # each link on the way to the interpreter, as virtual environments and installers make them
        prefixes.add(os.path.dirname(os.path.dirname(executable)))
        target = os.readlink(executable) if os.path.islink(executable) else ""
        executable = os.path.normpath(os.path.join(os.path.dirname(executable), target)) if target else ""
    argv = []
    for prefix in sorted(prefixes):
        if _below(prefix, SYSTEM_FOLDERS):
            continue
        if prefix == "/" or _below(os.path.expanduser("~"), [prefix]):
            raise InfraError(f"Python is installed in {prefix}, which a sandbox cannot expose without your home folder")
        argv += _make_bind_arguments(prefix, prefix)
    return argv


def _make_bind_arguments(inside: str, outside: str) -> list[str]:
    """Return arguments that show a path of this machine, below folders that are otherwise empty."""
    argv = []
    for parent in list(reversed(Path(inside).parents))[1:]:
        argv += ["--perms", "0755", "--dir", str(parent)]
    return [*argv, "--ro-bind", outside, inside]


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _find_spare_user() -> int | None:
    """Return a user and group id for one sandbox if we are root and may choose, else None."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        first, _, count = max((tuple(map(int, line.split())) for line in file), key=lambda extent: extent[2])
    if count < 1 << 16:
        return None
    if first == 0 and count > FREE_USERS.stop:
        return random.SystemRandom().choice(FREE_USERS)
    return first + count // 2 + random.SystemRandom().randrange(count // 2)


def _make_memory_file(content: bytes) -> int:
    """Return a descriptor that reads `content`."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
