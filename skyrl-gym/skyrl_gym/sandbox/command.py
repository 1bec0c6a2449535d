"""One running command of a sandbox on this machine: its pipes, its limits, its end. Independent of the kind of
isolation.

What contains the command, and how all of it is ended and measured, is a `Containment`.
"""

import errno
import os
import select
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Protocol

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import ExecResult, Limits, Outcome
from skyrl_gym.sandbox.rlimits import make_signal_arguments

CHUNK = 1 << 16
END_SECONDS = 30.0
"""Time that a killed command has to disappear, on a busy machine."""
CHECK_SECONDS = 0.05
CHECK_SHARE = 0.1
"""Share of one core spent on checking the limits of all commands: the more commands, the rarer the checks."""
LONGEST_PAUSE_SECONDS = 0.5
"""Maximum time between two checks of a command."""
COMMANDS_PER_PROCESSOR = 3
TURN_SECONDS = 3600.0


def as_bytes(text: str | bytes) -> bytes:
    """UTF-8. Half of a surrogate pair, which a model may write, is encoded as if it were a character."""
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


class Containment(Protocol):
    """Container around one command."""

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Send SIGKILL to the command and everything it started. May be called more than once."""
        ...

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        """Send SIGINT to the command itself."""
        ...

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        """Return the limit on all processes or all files together that is exceeded, if any."""
        ...

    def returncode(self, status: int) -> int | None:
        """Return the command's status, derived from its launcher's; None if the launcher failed and no command ran."""
        ...

    def close(self) -> None:
        """Close what it holds, after the end. May be called more than once."""
        ...


@dataclass
class Launch:
    """Command line to start, and descriptors to keep open for it (closed here once it runs)."""

    argv: Sequence[str | bytes]
    containment: Containment
    env: Mapping[str, str | bytes] = field(default_factory=dict)
    """Environment variables of the started process."""
    cwd: str = "/"
    descriptors: Sequence[int] = ()
    owner: int | None = None
    """User id that the pipes belong to, so that /dev/stdin and /dev/stdout can be opened by name."""


class Command:
    """A started command. Exited, hit a limit or was killed; all of its processes have exited and were reaped."""

    def __init__(self, launch: Launch, limits: Limits, *, stderr_to_file: bool = False):
        self.limits = limits
        self._containment = launch.containment
        self._stopped_by: Outcome | None = None
        self._killed = False
        self._failure: InfraError | None = None
        self._pidfd = -1
        self._stderr_to_file = stderr_to_file
        # Held while the process is signalled, checked or reaped: its id may belong to another process afterwards, and
        # once it is reaped, the containment's files are read and closed by one thread alone.
        self._lock = threading.RLock()
        self._result: ExecResult | None = None
        self._cpu_seconds = 0.0
        self._files: list[IO[bytes]] = []
        self._started = time.monotonic()
        self.deadline = self._started + limits.wall_seconds
        try:
            self._process = self._start(launch, stderr_to_file)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
            self.close()
            if isinstance(error, ValueError):
                raise
            if error.errno == errno.E2BIG:
                raise ValueError("the command's arguments are too long") from None
            raise InfraError(f"a sandboxed command could not be started: {error}") from error
        background.monitor.add(self)

    def _start(self, launch: Launch, stderr_to_file: bool) -> "subprocess.Popen[bytes]":
        with ExitStack() as inner:  # our copies of what is the command's

            def ends(pipe: tuple[int, int], ours: int) -> tuple[IO[bytes], int]:
                inner.callback(os.close, pipe[1 - ours])
                self._files.append(os.fdopen(pipe[ours], "wb" if ours else "rb", buffering=0))
                return self._files[-1], pipe[1 - ours]

            for descriptor in launch.descriptors:
                inner.callback(os.close, descriptor)
            self.stdin, stdin = ends(os.pipe(), 1)
            self.stdout, stdout = ends(os.pipe(), 0)
            if stderr_to_file:
                self._stderr = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                self._files.append(self._stderr)
                stderr = self._stderr.fileno()
            else:
                self._stderr, stderr = ends(os.pipe(), 0)
            if launch.owner is not None:
                for descriptor in (stdin, stdout, stderr):
                    os.fchown(descriptor, launch.owner, launch.owner)
            process = subprocess.Popen(
                [*make_signal_arguments(), *launch.argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=launch.env,
                cwd=launch.cwd,
                pass_fds=launch.descriptors,
                start_new_session=True,
            )
        try:
            # Readable once the process ends, so one `select` waits for its end and its output.
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        return process

    def communicate(self, stdin: bytes) -> ExecResult:
        """Feed the command, read its output up to the limit, and wait for its end."""
        pending = memoryview(stdin)
        said: dict[IO[bytes], bytearray] = {self.stdout: bytearray(), self._stderr: bytearray()}
        # Past the deadline the command is killed; a dead one may still need time to be reaped.
        last_moment = self.deadline + END_SECONDS
        with selectors.DefaultSelector() as selector:
            # Nonblocking: a command that reads nothing while it writes would else block us, and we it.
            for file in (self.stdin, *said):
                os.set_blocking(file.fileno(), False)
            if pending:
                selector.register(self.stdin, selectors.EVENT_WRITE)
            else:
                self.stdin.close()
            for file in said:
                selector.register(file, selectors.EVENT_READ)
            selector.register(self._pidfd, selectors.EVENT_READ)
            while not self.ended:
                now = time.monotonic()
                if now >= self.deadline:
                    self._kill("wall_time")
                if now > last_moment:
                    raise InfraError(f"a sandboxed command could not be ended within {END_SECONDS} s")
                for key, _ in selector.select(timeout=max(0.01, min(1.0, self.deadline - now))):
                    if key.fileobj is self.stdin:
                        pending = self._feed(pending)
                        if not pending:
                            selector.unregister(self.stdin)
                            self.stdin.close()
                    elif isinstance(key.fileobj, int):
                        self._reap()
                    elif not self._hear(key.fileobj, said[key.fileobj]):  # pyright: ignore
                        selector.unregister(key.fileobj)
            # Everything that could hold the other end is dead: what is in the pipes is all there will be.
            for file, heard in said.items():
                while self._hear(file, heard):
                    pass
        stdout, stderr = (bytes(heard[: self.limits.output_bytes]) for heard in said.values())
        return self._finish(stdout, stderr)

    def wait(self, timeout: float | None = None) -> ExecResult:
        if self._result is None:
            if not self._wait_for_end(timeout):
                raise TimeoutError(f"the command has not ended within {timeout} s")
            self._finish(b"", os.pread(self._stderr.fileno(), self.limits.output_bytes, 0))
        assert self._result is not None
        return self._result

    def interrupt(self) -> None:
        with self._lock:
            if self._process.returncode is None:
                self._containment.interrupt(self._process)

    def kill(self) -> None:
        self._kill(None)
        if not self._wait_for_end(END_SECONDS):
            raise InfraError(f"a sandboxed command could not be ended within {END_SECONDS} s")

    def check(self) -> None:
        """End the command if it is over a limit. Called by the monitor."""
        with self._lock:
            if self.ended:
                return
            try:
                over = self._limit_passed()
                if over is not None:
                    self._kill(over)
            except Exception as error:  # whatever it is: nothing unwatched may run on, and the monitor must
                self._failure = InfraError(f"the limits of a sandboxed command could not be checked: {error!r}")
                try:
                    self._containment.kill(self._process)
                except Exception:
                    self._process.kill()

    def _limit_passed(self) -> Outcome | None:
        if time.monotonic() >= self.deadline:
            return "wall_time"
        if self._stderr_to_file and os.fstat(self._stderr.fileno()).st_size > self.limits.output_bytes:
            return "output"
        return self._containment.over_limit(self._process, self.limits)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    def close(self) -> None:
        """Close what we hold of it. The command must have ended."""
        for file in self._files:
            file.close()
        self._containment.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _kill(self, why: Outcome | None) -> None:
        with self._lock:
            if self._process.returncode is None and not self._killed:
                self._killed = True
                self._stopped_by = why
                self._containment.kill(self._process)

    def _wait_for_end(self, timeout: float | None) -> bool:
        if not self.ended:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
            self._reap()
        return self.ended

    def _reap(self) -> None:
        """Take the exit status if the process has ended."""
        with self._lock:
            if self._process.returncode is not None:
                return
            try:
                # `wait4` instead of `Popen.wait`: it also gives the CPU time, that of waited-for descendants included.
                pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            except ChildProcessError as error:
                self._process.returncode = -signal.SIGKILL
                self._failure = InfraError("something else in this process took the exit status of a sandboxed command")
                self._failure.__cause__ = error
                return
            if pid == 0:
                return
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = usage.ru_utime + usage.ru_stime
        background.monitor.remove(self)

    def _feed(self, pending: memoryview) -> memoryview:
        try:
            return pending[os.write(self.stdin.fileno(), pending[:CHUNK]) :]
        except BlockingIOError:
            return pending
        except BrokenPipeError:
            return memoryview(b"")

    def _hear(self, file: IO[bytes], heard: bytearray) -> bool:
        """Read once. False at the end, or when there is nothing to read."""
        try:
            chunk = os.read(file.fileno(), CHUNK)
        except BlockingIOError:
            return False
        # One byte above the limit shows that it was exceeded.
        room = self.limits.output_bytes + 1 - len(heard)
        heard += chunk[: max(0, room)]
        if len(heard) > self.limits.output_bytes:
            self._kill("output")
        return bool(chunk)

    def _finish(self, stdout: bytes, stderr: bytes) -> ExecResult:
        wall_seconds = time.monotonic() - self._started
        if self._failure is not None:
            raise self._failure
        returncode = self._containment.returncode(self._process.returncode)
        if returncode is None and not self._killed:
            said = stderr.decode(errors="replace").strip()
            raise InfraError(f"the sandbox ended without running the command ({self._process.returncode}): {said}")
        returncode = -signal.SIGKILL if returncode is None else returncode
        outcome = self._stopped_by or _get_outcome(returncode, self._cpu_seconds, self.limits)
        if outcome == "exited":  # too fast for the monitor
            outcome = self._containment.over_limit(self._process, self.limits) or outcome
        self._result = ExecResult(
            outcome, returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"), wall_seconds
        )
        return self._result


def _get_outcome(returncode: int, cpu_seconds: float, limits: Limits) -> Outcome:
    """Return the kernel limit that ended the command. CPU time: SIGXCPU, and a second later SIGKILL."""
    if returncode == -signal.SIGXCPU or (returncode == -signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
        return "cpu_time"
    return "workspace" if returncode == -signal.SIGXFSZ else "exited"


class Monitor:
    """One thread of this process that checks the limits of every running command."""

    def __init__(self):
        self._commands: set[Command] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, command: Command) -> None:
        with self._changed:
            self._commands.add(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-monitor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, command: Command) -> None:
        with self._changed:
            self._commands.discard(command)

    def _run(self) -> None:
        pause = CHECK_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._commands)
            time.sleep(pause)  # most commands end before their first check
            with self._changed:
                # A copy: a check may take the lock again, to remove the command that it ended.
                commands = list(self._commands)
            started = time.thread_time()
            for command in commands:
                command.check()
            # Checks take at most `CHECK_SHARE` of a core: with many commands they become rarer.
            pause = min(max(CHECK_SECONDS, (time.thread_time() - started) / CHECK_SHARE), LONGEST_PAUSE_SECONDS)


class Background:
    """Singletons of this process: the monitor, slots, and a thread that starts commands which outlive their caller's.

    A command asks the kernel to be killed when the *thread* that started it ends, so a lasting thread must start it.
    And commands take turns, a few for each processor: hundreds at once would only use up each other's wall clock.
    """

    def __init__(self):
        self.monitor = Monitor()
        self._turns = threading.BoundedSemaphore(COMMANDS_PER_PROCESSOR * (os.cpu_count() or 1))
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")

    @contextmanager
    def turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=TURN_SECONDS):
            raise InfraError(f"no turn for a sandboxed command within {TURN_SECONDS} s")
        try:
            yield
        finally:
            self._turns.release()

    def start(self, launch: Launch, limits: Limits) -> Command:
        return self._starter.submit(Command, launch, limits, stderr_to_file=True).result()


background = Background()


def _after_fork() -> None:
    """Reset the state in a forked process, which has no threads."""
    global background
    background = Background()


os.register_at_fork(after_in_child=_after_fork)
