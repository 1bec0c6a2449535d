"""Hostile programs: the host stays as it was, the limit that ended them has the right name, and nothing stays.

Each runs after PRELUDE, which gives it `host` (what it should find out or touch), `refused` (runs something that must
fail, and says whether it did) and `syscall`.
"""

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.sandbox import Limits, Sandbox, deletion, make_sandbox
from skyrl_gym.sandbox.container import KEEPER, Container, ContainerSandbox
from skyrl_gym.sandbox.testing import needed_image

from ..sandboxed import processes_with
from .conftest import backend

PRELUDE = r"""
import ctypes, errno, json, mmap, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
host = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
INTEL = platform.machine() == "x86_64"

def refused(what, attempt, *arguments, **options):
    try:
        got = attempt(*arguments, **options)
    except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
        print("refused", what, repr(error)[:200], flush=True)
    else:
        print("BROKE", what, repr(got)[:200], flush=True)

def syscall(on_intel, on_arm, *arguments):
    got = libc.syscall(on_intel if INTEL else on_arm, *arguments)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got

def read(path):
    with open(path, "rb") as file:
        return file.read(10000)

def write(path, data=b"x"):
    with open(path, "wb") as file:
        return file.write(data)

def wait_for_children():
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
"""

MEBIBYTE = 1 << 20
SMALL = Limits(
    wall_seconds=15,
    cpu_seconds=10,
    memory_bytes=256 * MEBIBYTE,
    file_bytes=16 * MEBIBYTE,
    workspace_bytes=48 * MEBIBYTE,
    processes=24,
)
SHORT = Limits(wall_seconds=0.6, cpu_seconds=10, memory_bytes=256 * MEBIBYTE, processes=24)
CPU = Limits(wall_seconds=60, cpu_seconds=1, memory_bytes=256 * MEBIBYTE, processes=24)
FEW = Limits(workspace_bytes=4 * MEBIBYTE)
SLOW = {"files without a name or a descriptor"}
STDIN = {"input that is never read": b"x" * 10_000_000}


@dataclass(frozen=True)
class Hostile:
    """A hostile program, and its expected outcome."""

    name: str
    source: str
    outcomes: tuple[str, ...]
    says: tuple[str, ...]
    """Texts that its output must contain, so that a program that failed too early does not count as success."""
    limits: Limits


READ_AS = re.compile(r"@@ (.+?)(?: -> ([\w, ]+?))?(?: under (\w+))?(?: says (.+))?")


def read_programs(text: str) -> Iterator[Hostile]:
    """Read programs, each after a header `@@ name -> outcomes under LIMITS says text | text`, of which all but the name
    may be missing."""
    for part in re.split(r"^(?=@@ )", re.sub(r"^## .*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]:
        header, _, source = part.partition("\n")
        found = READ_AS.fullmatch(header)
        assert found is not None, header
        name, outcomes, limits, says = found.groups()
        yield Hostile(
            name,
            source,
            tuple(outcomes.split(", ")) if outcomes else ("exited",),
            tuple(says.split(" | ")) if says else (),
            {None: SMALL, "SHORT": SHORT, "CPU": CPU, "FEW": FEW}[limits],
        )


PROGRAMS = list(
    read_programs(
        r"""
## using up the machine
@@ fork bomb -> wall_time under SHORT
while True:
    try:
        os.fork()
    except OSError:
        pass
@@ more processes than allowed says refused after | few
made = 0
try:
    for made in range(1000):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError as error:
    print("refused after", made, error)
print("few" if made <= 24 else "BROKE many", flush=True)
@@ more threads than allowed says refused after | few
made = 0
threading.stack_size(65536)
try:
    for made in range(1000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError as error:
    print("refused after", made, error)
print("few" if made <= 24 else "BROKE many", flush=True)
os._exit(0)
@@ memory of one process says MemoryError
held = []
while True: held.append(bytearray(1 << 20))
@@ memory of many processes -> memory
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (100 << 20)
        time.sleep(60)
time.sleep(60)
@@ shared memory that stays when it is unmapped says refused anonymous
refused("anonymous", mmap.mmap, -1, 100 << 20)
if not os.path.exists("/.dockerenv") and "container" not in os.environ:  # a container counts it
    refused("zero", lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 100 << 20))
@@ memory in /dev/shm -> workspace
for number in range(1000):
    write(f"/dev/shm/{number}", bytes(8 << 20))
time.sleep(60)
@@ memory in tmpfs that nobody counts says refused /dev  | refused tmpfs
for folder in ("/", "/dev", "/etc", "/root", "/home", "/run", "/var"):
    refused(folder, write, f"{folder}/file")
refused("tmpfs", syscall, 165, 40, b"none", b"/tmp", b"tmpfs", 0, 0)
@@ memory that belongs to no process says refused memfd_create | refused shmget | refused semget | refused msgget
refused("memfd_create", os.memfd_create, "x")
refused("memfd_secret", syscall, 447, 447, 0)
refused("shmget", syscall, 29, 194, 0, 1 << 20, 0o1600)
refused("semget", syscall, 64, 190, 0, 32000, 0o1600)
refused("msgget", syscall, 68, 186, 0, 0o1600)
refused("mq_open", syscall, 240, 180, b"queue", os.O_CREAT | os.O_RDWR, 0o600, 0)
refused("mlock", syscall, 151, 230, 0)
@@ ten gigabytes of output -> output
while True: os.write(1, b'line\n' * 10000)
@@ ten gigabytes of errors -> output
while True: os.write(2, b'line\n' * 10000)
@@ a line without end -> output
while True: sys.stdout.write('x' * 1000)
@@ output of many processes -> output
for _ in range(4): os.fork()
while True: os.write(1, b"x" * 4096)
@@ endless loop that ignores every signal -> cpu_time under CPU
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
@@ sleep that ignores every signal -> wall_time under SHORT
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
while True: time.sleep(60)
@@ sleep for ever -> wall_time under SHORT
time.sleep(1e6)
@@ stop oneself -> wall_time under SHORT
os.kill(os.getpid(), signal.SIGSTOP)
@@ one big file says File too large
write('big', bytes(100 << 20))
@@ one big file from a program that dies of it -> workspace
signal.signal(signal.SIGXFSZ, signal.SIG_DFL); write('big', bytes(100 << 20))
@@ one sparse file says refused
refused('sparse', os.truncate, os.open('big', os.O_CREAT | os.O_RDWR), 10 << 30)
@@ a file of blocks that nobody wrote says refused
refused('fallocate', syscall, 285, 47, os.open('f', 66), 0, 0, 1 << 20)
@@ many big files -> workspace
for n in range(100): write(str(n), bytes(8 << 20))
time.sleep(60)
@@ many files, quickly -> workspace
for n in range(8): write(str(n), bytes(8 << 20))
@@ files in a folder closed to their owner -> workspace
os.mkdir("closed")
while True:
    os.chmod("closed", 0o700)
    write(f"closed/{time.monotonic()}", bytes(8 << 20))
    os.chmod("closed", 0)
@@ files without a name -> workspace
held = []
for number in range(100):
    held.append(open("file", "wb", buffering=0))
    os.unlink("file")
    held[-1].write(bytes(8 << 20))
    time.sleep(0.02)
time.sleep(60)
@@ folders without end -> exited, workspace
for _ in range(3000):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
print("deep", flush=True)
@@ a closed folder in a closed folder says closed
os.makedirs("a/b/c")
write("a/b/c/file")
for folder in ("a/b/c", "a/b", "a", "."):
    try: os.chmod(folder, 0)
    except PermissionError: print("refused", folder)  # the workspace itself is not ours in a container of Podman
print("closed", flush=True)
@@ open files says Too many open files
held = []
while True: held.append(os.open('/dev/null', os.O_RDONLY))
@@ arguments without end says refused exec
refused('exec', os.execv, '/usr/bin/env', ['x' * 10_000_000])
@@ many empty files -> workspace under FEW
for n in range(100000): write(str(n), b'')
time.sleep(60)
@@ files without a name or a descriptor -> workspace
held = []
for number in range(1000):
    file = open("file", "w+b", buffering=0)
    os.unlink("file")
    file.write(bytes(15 << 20))
    held.append(mmap.mmap(file.fileno(), 4096))
    file.close()
    time.sleep(0.02)
time.sleep(60)
@@ input that is never read -> wall_time under SHORT
time.sleep(60)
## the network
@@ connect to a server of the host says refused connect
refused('connect', socket.create_connection, ('127.0.0.1', host['port']), 3)
@@ connect to the world says refused address  | refused address 6 | refused datagram
refused("address", socket.create_connection, ("192.0.2.1", 80), 3)
refused("address 6", socket.create_connection, ("2001:db8::1", 80), 3)
refused("datagram", socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b"x", ("192.0.2.1", 53))
@@ ask for a name says refused name
refused('name', socket.getaddrinfo, 'example.com', 80)
@@ connect to an abstract socket of the host says refused connect
refused('connect', socket.socket(socket.AF_UNIX).connect, '\0' + host['abstract'])
@@ connect to a socket file of the host says refused connect
refused('connect', socket.socket(socket.AF_UNIX).connect, host['socket'])
@@ sockets of rare kinds says refused raw | refused packet | refused to the host | refused kernel
refused("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
refused("packet", socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
refused("to the host of a virtual machine", socket.socket, 40, socket.SOCK_STREAM)
refused("kernel cryptography", socket.socket, 38, socket.SOCK_SEQPACKET)
refused("bluetooth", socket.socket, 31, socket.SOCK_RAW, 1)
@@ a network device of its own says refused
link = socket.socket(16, socket.SOCK_RAW, 0)
body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH8s", 8, 3, b"eth9\0\0\0\0")
link.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
code = struct.unpack_from("i", link.recv(4096), 16)[0]
print("refused" if code == -errno.EPERM else "BROKE", code)
## reading what is not its own
@@ read secrets of the host says refused
for path in host['secrets']: refused(path, read, path)
@@ read the home folder says refused .ssh
try:
    print("seen", [name for name in os.listdir(host["home"])])
except OSError as error:
    print("refused", error)
for name in (".ssh", ".bashrc", ".bash_history", ".netrc", ".config", ".cache"):
    refused(name, os.stat, os.path.join(host["home"], name))
@@ read the password file says refused shadow
refused('shadow', read, '/etc/shadow')
print('users', read('/etc/passwd').count(b'\n'))
@@ look beside the workspace says nothing
seen = set(os.listdir("/tmp")) | set(os.listdir("..")) | set(os.listdir("/workspace/.."))
print("BROKE" if any("secret" in name or "skyrl" in name for name in seen) else "nothing", seen)
@@ environments of other processes says looked
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        print(read(f"/proc/{process}/environ"))
        print([part for part in read(f"/proc/{process}/cmdline").split(bytes(1)) if len(part) < 200])
    except OSError as error:
        print(error)
print("looked")
@@ roots of other processes says refused 1root | refused selfcwd
for process in ("1", "self", str(os.getppid())):
    for way in ("root", "cwd", "root/..", "root/../../..", "cwd/../../.."):
        for secret in host["secrets"]:
            refused(process + way, read, f"/proc/{process}/{way}{secret}")
@@ descriptors that were left open says only
seen = sorted(int(name) for name in os.listdir("/proc/self/fd"))
print("BROKE" if len(seen) > 4 else "only", seen)  # and the one that lists them
for process in filter(str.isdigit, os.listdir("/proc")):
    for number in range(3, 30):
        try: target = os.readlink(f"/proc/{process}/fd/{number}")
        except OSError: continue
        inside = not target.startswith("/") or target.startswith("/proc") or target == "/dev/null"
        print("" if inside else "BROKE", target)
@@ files by number says refused
handle = struct.pack("IiQ", 8, 1, 2)
refused("open_by_handle_at", syscall, 304, 265, os.open("/usr", os.O_RDONLY), handle, os.O_RDONLY)
@@ the kernel's log and keys says refused log | refused add_key | refused keyctl
refused("log", syscall, 103, 116, 3, ctypes.create_string_buffer(4096), 4096)
refused("kmsg", read, "/dev/kmsg")
refused("add_key", syscall, 248, 217, b"user", b"x", b"y", 1, -3)
refused("keyctl", syscall, 250, 219, 0, -3, 1)
refused("request_key", syscall, 249, 218, b"user", b"x", None, -3)
refused("memory", read, "/dev/mem")
refused("kcore", read, "/proc/kcore")
@@ the environment of the host says False
print(dict(os.environ)); print('HOST_SECRET' in os.environ)
## changing what is not its own
@@ write outside says refused /usr/bin | refused python | refused chmod
places = ["/", "/usr/bin", "/usr/lib", "/etc", "/dev", "/proc", "/root", os.path.dirname(sys.executable), sys.prefix]
for place in places + host["folders"]:
    refused(place, write, f"{place}/{host['canary']}")
refused("python", write, os.path.realpath(sys.executable))
refused("passwd", write, "/etc/passwd")
refused("usr", os.rename, "/usr/bin", "/usr/nib")
refused("delete", os.unlink, "/usr/bin/env")
refused("chmod", os.chmod, "/usr/bin/env", 0o777)
refused("touch", os.utime, "/usr/bin/env")
@@ the kernel's settings says refused kernel/hostname | refused sysrq | refused host name | refused time
for path in ("kernel/hostname", "kernel/core_pattern", "vm/overcommit_memory", "fs/file-max", "net/ipv4/ip_forward"):
    refused(path, write, f"/proc/sys/{path}", b"1")
refused("sysrq", write, "/proc/sysrq-trigger", b"b")
for path in ("/sys/fs/cgroup/cgroup.procs", "/sys/kernel/uevent_helper", "/sys/power/state"):
    refused(path, write, path, b"1")
refused("better chances than the host's", write, "/proc/self/oom_score_adj", b"-1000")
refused("host name", socket.sethostname, "x")
refused("time", time.clock_settime, time.CLOCK_REALTIME, 0)
refused("reboot", syscall, 169, 142, 0xFEE1DEAD, 672274793, 0x1234567)
@@ mounts, roots, devices, users says refused mount | refused chroot | refused mknod | refused setuid | refused chown
refused("mount", syscall, 165, 40, b"/usr", b"/tmp", b"", 4096, 0)
refused("remount", syscall, 165, 40, b"none", b"/", b"", 32, 0)
refused("proc", syscall, 165, 40, b"proc", b"/tmp", b"proc", 0, 0)
refused("umount", syscall, 166, 39, b"/tmp", 2)
refused("pivot", syscall, 155, 41, b"/tmp", b"/tmp")
refused("fsopen", syscall, 430, 430, b"tmpfs", 0)
refused("open_tree", syscall, 428, 428, -100, b"/usr", 1)
refused("chroot", os.chroot, "/tmp")
refused("mknod", os.mknod, "disk", 0o060600, os.makedev(254, 0))
refused("setuid", os.setuid, 0)
refused("setgid", os.setgid, 0)
refused("setgroups", os.setgroups, [0])
refused("chown", os.chown, ".", 0, 0)
refused("module", syscall, 313, 273, 0, b"", 0)
@@ namespaces in namespaces says refused unshare 10000000 | refused clone 10000000 | refused clone3 | refused program
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    refused(f"unshare {flag:x}", syscall, 272, 97, flag)
    if flag != 0x80:
        refused(f"clone {flag:x}", syscall, 56, 220, flag | signal.SIGCHLD, 0, 0, 0, 0)
refused("clone3", syscall, 435, 435, struct.pack("8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64)
for name in os.listdir("/proc/self/ns"):
    try: refused(f"setns {name}", syscall, 308, 268, os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)
    except OSError as error: print("refused", error)
refused("program", subprocess.run, ["unshare", "-Ur", "id"], check=True)
@@ programs that change the user says refused su | refused, read only
for command in (["su", "-c", "id"], ["mount", "/tmp"], ["newgrp", "root"], ["passwd", "-d", "root"]):
    try: refused(command[0], subprocess.run, command, check=True, stdin=subprocess.DEVNULL, timeout=5)
    except FileNotFoundError: print("refused", command)
os.chmod(sys.executable, 0o4755) if os.access(sys.executable, os.W_OK) else print("refused, read only")
@@ corners of the kernel says refused bpf | refused perf_event_open | refused userfaultfd | refused io_uring
refused("bpf", syscall, 321, 280, 0, ctypes.create_string_buffer(128), 128)
refused("perf_event_open", syscall, 298, 241, ctypes.create_string_buffer(128), 0, -1, -1, 0)
refused("userfaultfd", syscall, 323, 282, 1)
refused("io_uring", syscall, 425, 425, 8, ctypes.create_string_buffer(256))
refused("fanotify", syscall, 300, 262, 0, 0)
refused("kexec", syscall, 246, 104, 0, 0, None, 0)
@@ limits raised again says refused AS | refused NPROC | refused real time | refused haste
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK", "RTPRIO"):
    which = getattr(resource, f"RLIMIT_{name}")
    refused(name, resource.setrlimit, which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
refused("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
refused("haste", os.setpriority, os.PRIO_PROCESS, 0, -20)
## other processes
@@ processes of the host says refused kill
refused("seen", os.stat, f"/proc/{host['pid']}/status") if host["pid"] > 100 else None
for number in (signal.SIGTERM, signal.SIGKILL, 0):
    refused("kill", os.kill, host["pid"], number)
print("processes", [name for name in os.listdir("/proc") if name.isdigit()])
@@ kill everybody says still here
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
print('still here')
@@ kill the parent says still here
for number in range(1, 65):
    try: os.kill(os.getppid() or 1, number)
    except OSError as error: print("refused", error)
print("still here", flush=True)
@@ trace the parent says refused attach | refused vm_write
refused("attach", syscall, 101, 117, 16, os.getppid(), 0, 0)
refused("seize", syscall, 101, 117, 0x4206, os.getppid(), 0, 0)
refused("vm_write", syscall, 311, 271, os.getppid(), 0, 0, 0, 0, 0)
@@ a daemon that stays says left
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        os.closerange(0, 100)
        beat = "import time\nwhile True: open('heartbeat', 'a').write('x'); time.sleep(0.01)"
        os.execve(sys.executable, ["daemon", "-I", "-S", "-c", beat], {})
    os._exit(0)
os.wait()
while not os.path.exists("heartbeat"): time.sleep(0.01)
print("left", flush=True)
@@ a child that keeps the output open says left
if os.fork() == 0:
    os.setsid(); time.sleep(1e6)
print('left', flush=True)
@@ children that nobody waits for says orphans True
for _ in range(60):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
print("orphans", len([name for name in os.listdir("/proc") if name.isdigit()]) < 24)
@@ everything closed -> wall_time under SHORT
os.closerange(0, 1000); time.sleep(1e6)
@@ bytes for a terminal that is not there says refused inject | refused terminal
import fcntl
refused('inject', fcntl.ioctl, 0, 0x5412, b'x')
refused('terminal', read, '/dev/tty')
"""
    )
)


SECRET = "the-secret-of-the-host"


@dataclass
class Host:
    """State of the host that must not change: secrets not read, servers not reached, folders not written."""

    server: socket.socket
    abstract: socket.socket
    file: socket.socket
    folders: list[Path]
    canary: str

    def described(self) -> dict[str, Any]:
        return {
            "port": self.server.getsockname()[1],
            "abstract": self.abstract.getsockname()[1:].decode(),
            "socket": self.file.getsockname(),
            "secrets": [str(folder / "secret") for folder in self.folders],
            "folders": [str(folder) for folder in self.folders],
            "canary": self.canary,
            "home": str(Path.home()),
            "pid": os.getpid(),
        }

    def check(self) -> None:
        for listening in (self.server, self.abstract, self.file):
            with pytest.raises(BlockingIOError):
                listening.accept()
        for folder in self.folders:
            assert (folder / "secret").read_text() == SECRET
            assert not (folder / self.canary).exists()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("HOST_SECRET", SECRET)
    homes = [Path.home()] if os.access(Path.home(), os.W_OK) else []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
        tempfile.TemporaryDirectory(prefix="secret-") as folder,
        tempfile.TemporaryDirectory(prefix="secret-", dir=(homes or [None])[0]) as at_home,
    ):
        abstract.bind(f"\0{Path(folder).name}")
        file.bind(f"{folder}/socket")
        for path in (folder, at_home):
            Path(path).chmod(0o755)
            (Path(path) / "secret").write_text(SECRET)
        Path(f"{folder}/socket").chmod(0o777)
        for listening in (server, abstract, file):
            listening.listen()
            listening.setblocking(False)
        yield Host(server, abstract, file, [Path(folder), Path(at_home)], f"canary-{Path(folder).name}")


def traces_of(sandbox: Sandbox) -> Callable[[], list[str | int]]:
    """Return a function that lists the traces of a sandbox on the host: its processes, its folder or container."""
    workspace = sandbox._workspace  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(workspace, Container):
        known = ("sleep 600", "sh -c", "COMMAND", *KEEPER.strip().splitlines())  # what the container itself runs

        def in_container() -> list[str | int]:
            wanted = ["pid", "args"] if workspace.engine == "podman" else ["-o", "pid,args"]
            top = subprocess.run([workspace.engine, "top", workspace.name, *wanted], capture_output=True, text=True)
            return ["container"] * (top.returncode == 0) + [
                line for line in top.stdout.splitlines() if line.strip() and not line.strip().endswith(known)
            ]

        return in_container
    return lambda: (
        ["folder"] * os.path.exists(workspace.root) + processes_with(os.path.basename(workspace.root), "mountinfo")
    )


@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.name in SLOW)) for p in PROGRAMS]
)
def test_hostile_program_is_contained(walled_kind, host, program):
    walled, limits = backend(walled_kind), program.limits
    if isinstance(
        walled, ContainerSandbox
    ):  # its limits are the container's, and an engine takes a second for a command
        limits = replace(limits, wall_seconds=max(5.0, limits.wall_seconds))
        walled = ContainerSandbox(limits, engine=walled.engine, image=needed_image(walled.engine))
    with walled:
        contain(walled, host, program, limits)


def contain(walled: Sandbox, host: Host, program: Hostile, limits: Limits) -> None:
    traces = traces_of(walled)
    arguments = ["-I", "-S", "-c", PRELUDE + program.source, json.dumps(host.described())]
    started = time.monotonic()
    result = walled.exec([walled.python, *arguments], stdin=STDIN.get(program.name, b""), limits=limits)
    assert len(traces()) == 1, traces()  # the folder or container
    said = result.stdout + result.stderr
    assert time.monotonic() - started < limits.wall_seconds + 10
    if isinstance(walled, ContainerSandbox) and set(program.outcomes) & {"memory", "workspace"}:
        assert result.outcome in (*program.outcomes, "wall_time") or "No space left" in said, said
    else:
        assert result.outcome in program.outcomes, said
    assert "BROKE" not in said
    assert SECRET not in said
    assert [text for text in program.says if text not in said] == [], said
    host.check()
    after = walled.exec(["echo", "well"], limits=replace(limits, wall_seconds=20.0))
    assert after.stdout == "well\n" or result.outcome == "workspace"
    walled.close()
    deletion.left_folders.wait()  # thousands of folders may take longer than `close` waits
    assert traces() == []


def test_hostile_programs_succeed_without_isolation(host):
    """Control: without a sandbox the programs do read and reach everything."""
    with make_sandbox("process") as sandbox:
        for program in PROGRAMS:
            if program.name in ("read secrets of the host", "connect to a server of the host"):
                arguments = ["-I", "-S", "-c", PRELUDE + program.source, json.dumps(host.described())]
                assert "BROKE" in sandbox.exec([sandbox.python, *arguments]).stdout


def test_daemon_is_killed_with_command(walled):
    program = next(program for program in PROGRAMS if program.name == "a daemon that stays")
    walled.exec([walled.python, "-I", "-S", "-c", PRELUDE + program.source, "{}"])
    before = walled.read("heartbeat")
    time.sleep(0.2)
    assert walled.read("heartbeat") == before


@pytest.mark.parametrize(
    "make",
    [
        "ln -s /etc/passwd it",
        "ln -s /proc/self/environ it",
        "ln -s secret it; echo x > secret",
        "mkfifo it",
        "mkdir it",
        "ln /usr/bin/env it || ln -s /usr/bin/env it",
        "ln -s /dev/zero it",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"it\")' || mkfifo it",
    ],
)
def test_special_files_are_not_read(walled, make):
    assert walled.exec(["sh", "-c", make]).ok
    with pytest.raises(ValueError, match="regular file"):
        walled.read("it")


def test_read_and_write_reject_symlinked_folder(walled, host):
    target = host.folders[0]
    assert walled.exec(["ln", "-s", str(target), "out"]).ok
    with pytest.raises(ValueError, match="regular file"):
        walled.read("out/secret")
    with pytest.raises(ValueError, match="regular file"):
        walled.write(f"out/{host.canary}", "x")
    host.check()


@pytest.mark.parametrize("make", ["ln -s {} it", "mkfifo it", "ln -s /dev/null it"])
def test_write_replaces_special_file(walled, host, make):
    assert walled.exec(["sh", "-c", make.format(host.folders[0] / "secret")]).ok
    walled.write("it", "mine")
    assert walled.read("it") == b"mine"
    host.check()


def test_read_rejects_file_above_size_limit(walled):
    limits = Limits(file_bytes=1 << 40)
    assert walled.exec(["truncate", "-s", "65M", "big"], limits=limits).ok
    with pytest.raises(ValueError, match="larger than"):
        walled.read("big")


SWAP = """
import os, sys
while True:
    try: os.rename("a", "b"); os.symlink(sys.argv[1], "a"); os.unlink("a"); os.rename("b", "a")
    except OSError: pass
"""


def test_read_and_write_resist_symlink_races(walled, host):
    walled.write("a/x", "")
    process = walled.popen([walled.python, "-I", "-S", "-c", SWAP, str(host.folders[0])])
    for _ in range(20 if isinstance(walled, ContainerSandbox) else 300):
        with suppress(ValueError, FileNotFoundError):
            walled.write(f"a/{host.canary}", "x")
        with suppress(ValueError, FileNotFoundError):
            assert SECRET.encode() not in walled.read("a/secret")
    process.kill()
    host.check()
