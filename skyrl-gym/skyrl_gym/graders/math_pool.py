"""Pool of long-lived processes that compare mathematical answers. An unresponsive process is replaced.

Algebra can hang in a single operation that no thread can interrupt, and signals work only in the main thread; so it
runs in processes (`math_worker`), which are killed and restarted.
"""

import atexit
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

from skyrl_gym.error import InfraError
from skyrl_gym.graders.results import Grade, Invalid, Score, Timeout

__all__ = ["EquivalencePool", "default_pool"]

CPU_SECONDS = 3.0
"""CPU time limit of one comparison; ordinary ones take milliseconds."""

WALL_SECONDS = 60.0
"""A process that is neither done nor out of CPU time by then is not getting any: that is the machine's fault."""

START_SECONDS = 120.0
QUEUE_SECONDS = 600.0
"""Maximum time that a comparison waits in the queue."""

MAX_PROCESSES = 4
"""Each has about 90 MB."""


class EquivalencePool:
    """Pool of at most `num_processes` processes that compare answers, started on first use.

    For any number of threads: who finds all processes busy waits. Closed at the interpreter's exit if not before; the
        processes also exit when this one has exited.
    """

    def __init__(
        self, num_processes: int | None = None, cpu_seconds: float = CPU_SECONDS, python: str = sys.executable
    ) -> None:
        if num_processes is None:
            num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
        self.cpu_seconds = cpu_seconds
        self.python = python
        self._lock = threading.Lock()
        self._alive: set[_Process] = set()
        self._closed = False
        self._turns: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # last in, first out: started ones first
        for _ in range(num_processes):
            self._turns.put(None)
        atexit.register(self.close)

    def compare(self, answer: str, gold: str) -> Grade:
        """Score 1 or 0; Timeout if the CPU seconds are used up; Invalid if the comparison ends the process twice, by
        want of memory or of stack; InfraError if no process can be had or one is killed from outside."""
        crash = None
        # A crash counts as the answer's fault only if a fresh process crashes too: the first may have been worn out.
        for _ in range(2):
            try:
                return self._compare(answer, gold)
            except InfraError as failure:
                return failure
            except _Crash as once_more:
                crash = once_more
        return Invalid(f"the answer cannot be compared: {crash}")

    def _compare(self, answer: str, gold: str) -> Grade:
        try:
            # A slot holds a started process, or None where one is to be started: starting takes a second.
            process = self._turns.get(timeout=QUEUE_SECONDS)
        except queue.Empty:
            raise InfraError(f"no process for comparing answers became free within {QUEUE_SECONDS:g} s") from None
        try:
            if process is None:
                process = self._start()
            reply = process.ask({"answer": answer, "gold": gold, "cpu_seconds": self.cpu_seconds}, WALL_SECONDS)
            if reply["worn"]:
                process = self._end(process)
            return Score(float(reply["same"]))
        except _OutOfTime:
            process = self._end(process)
            return Timeout(self.cpu_seconds, "comparing the answer")
        except (_Crash, InfraError):
            process = self._end(process)
            raise
        finally:
            # Release the slot in every case: otherwise threads would wait for it forever.
            self._turns.put(process)

    def _start(self) -> "_Process":
        process = _Process(self.python)
        with self._lock:
            if self._closed:
                process.close()
                raise InfraError("this EquivalencePool is closed")
            # Under the lock that `close` takes: it kills each process that is alive, this one included.
            self._alive.add(process)
        try:
            process.wait_until_ready()
        except InfraError:
            self._end(process)
            raise
        return process

    def _end(self, process: "_Process | None") -> None:
        if process is not None:
            process.close()
            with self._lock:
                self._alive.discard(process)

    def close(self) -> None:
        """End the processes. May be called more than once."""
        with self._lock:
            self._closed = True
            # Killed, not closed: other threads may be reading their output, and see its end.
            for process in self._alive:
                process.kill()
        idle = [self._turns.get_nowait() for _ in range(self._turns.qsize())]
        for process in idle:  # who has one of the others sees it end, and clears it away
            self._turns.put(self._end(process))
        atexit.unregister(self.close)


class _OutOfTime(Exception):
    """The kernel ended the process because its CPU seconds were used up."""


class _Crash(Exception):
    """The process crashed during a comparison."""


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class _Process:
    """One `math_worker`, used by one thread at a time."""

    def __init__(self, python: str) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # so that it finds what we have found
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-m", "skyrl_gym.graders.math_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is handled by the parent process
            )
        except OSError as failure:
            self._stderr.close()
            raise InfraError(f"a process for comparing answers cannot start: {failure}") from failure

    def wait_until_ready(self) -> None:
        try:
            self._read(START_SECONDS)
        except _Crash as crash:
            raise InfraError(f"a process for comparing answers cannot start: {crash}") from crash

    def ask(self, request: dict[str, object], seconds: float) -> dict[str, bool]:
        """Raises _OutOfTime, _Crash, InfraError; the process is of no more use then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # fits the pipe: answers are bounded
        except OSError as failure:
            raise self._ended() from failure
        return json.loads(self._read(seconds))

    def _read(self, seconds: float) -> bytes:
        """Read a line within a timeout in seconds."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise InfraError(f"a process that compares answers got too little CPU time to respond in {seconds} s")
            chunk = os.read(descriptor, 4096)  # unbuffered: `poll` does not see what a buffer holds
            if not chunk:
                raise self._ended()
            line += chunk
        return line

    def _ended(self) -> Exception:
        """Return the exception that describes the end of the process."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return InfraError("a process for comparing answers closed its output but is still running")
        if status == -signal.SIGXCPU:
            return _OutOfTime()
        self._stderr.seek(0)
        tail = self._stderr.read()[-2000:].decode(errors="replace").strip()
        text = f"exit status {status}{': ' if tail else ''}{tail}"
        if status > 0 or -status in _CRASHES:
            return _Crash(text)
        return InfraError(f"a process for comparing answers was killed from outside: {text}")

    def kill(self) -> None:
        """End it. For any thread: one that waits for a reply sees the end of the output."""
        self._process.kill()

    def close(self) -> None:
        """End the process and release its resources. For the thread that uses it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()


_default: EquivalencePool | None = None
_default_lock = threading.Lock()


def default_pool() -> EquivalencePool:
    """Return the pool that all of this process's graders share."""
    global _default
    with _default_lock:
        if _default is None:
            _default = EquivalencePool()
        return _default


_of_parents: list[EquivalencePool | None] = []


def _forget_pool_of_parent() -> None:
    """Drop the pool after a fork, since its pipes belong to the parent. The old pool stays referenced, because its
    finalizer would complain of processes that have not exited."""
    global _default, _default_lock
    if _default is not None:
        atexit.unregister(_default.close)
    _of_parents.append(_default)
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool_of_parent)
