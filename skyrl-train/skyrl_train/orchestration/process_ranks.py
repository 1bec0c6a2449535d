"""Ranks as processes of this machine, without Ray: `Ranks` of an actor group.

`python -m skyrl_train.orchestration.process_ranks DESCRIPTOR NAME LOG` runs one rank, which serves the connection with
this file descriptor.
"""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from skyrl_gym.deadline import outcome_of
from skyrl_gym.waits import NEXT_CALL, report_as, waiting
from skyrl_train.errors import WorkerError, WorkerMemoryError
from skyrl_train.utils.call_errors import KILLED_HINT, build_failure, get_end_of_log, record_rank_wait, timed_out
from skyrl_train.utils.cpu_numerics import prepare_cpu
from skyrl_train.utils.explanations import TRAINER
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.tracebacks import attach_raise_location, described, log_traceback

if TYPE_CHECKING:
    from skyrl_train.orchestration.launcher import Calls, MakeWorker

Dumps = Callable[[object], bytes]

ORPHANED = 3
"""Exit status of a rank whose driver has exited."""
_EXIT_SECONDS = 10.0
_GRACE_SECONDS = 1.0
"""A rank that lost its peer may exit before that peer is reported: time to wait for the rank that failed first."""


class RankProcess(Protocol):
    """Interface of `subprocess.Popen` that is used for a rank."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class ProcessRanks:
    """Ranks 0..N-1 of one worker class as processes, which exit when this process exits for any reason.

    Args:
        name: name of the group, for logs and errors.
        make_worker, args: builder of each worker and its arguments, called in the worker's process.
        device: `cpu` or `cuda`; on CUDA each rank sees one of this process's visible GPUs, in order.
        log_folder: each rank writes `<name>_<rank>.log` there.
    """

    dumps: Dumps = staticmethod(pickle.dumps)

    def __init__(
        self,
        name: str,
        make_worker: "MakeWorker",
        args: tuple[object, ...] = (),
        *,
        num_ranks: int,
        device: str = "cpu",
        log_folder: Path,
    ):
        self.name, self.num_ranks = name, num_ranks
        self._log_files = [str(log_folder / f"{name}_{rank}.log") for rank in range(num_ranks)]
        self._processes: list[RankProcess] = []
        self._pipes: list[Connection] = []
        self._one_at_a_time = asyncio.Lock()
        log_folder.mkdir(parents=True, exist_ok=True)
        # Each rank sees one GPU, as under Ray, and computes on its `cuda:0`.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_ranks)))
        gpus = visible.split(",") if device == "cuda" else [None] * num_ranks
        for rank, (gpu, log_file) in enumerate(zip(gpus, self._log_files, strict=False)):
            environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            process, pipe = self._start(self._worker(rank), log_file, environment)
            self._processes.append(process)
            self._pipes.append(pipe)
            pipe.send_bytes(self.dumps((make_worker, args)))

    def _start(self, name: str, log_file: str, environment: dict[str, str]) -> tuple[RankProcess, Connection]:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), name, log_file]
        with (
            theirs,
            open(log_file, "ab") as output,
        ):  # close our copy of their end, otherwise the end of the connection is never detected
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1"} | os.environ | environment,
            )
        return process, ours

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def call(self, calls: "Sequence[Calls]", timeout_seconds: float, timeout_setting: str) -> list[list[object]]:
        async with self._one_at_a_time:  # results arrive in the order of the calls
            with record_rank_wait(self.name, calls, timeout_seconds):
                for pipe, own in zip(self._pipes, calls, strict=True):
                    try:
                        pipe.send_bytes(self.dumps(own))
                    except OSError:
                        raise self._describe_exits() from None
                return await asyncio.to_thread(self._answers, timeout_seconds, timeout_setting)

    def _answers(self, timeout_seconds: float, timeout_setting: str) -> list[list[object]]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, list[object]] = {}
        while waiting := [rank for rank in range(self.num_ranks) if rank not in answers]:
            pipes = wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not pipes:
                silent = [(self._worker(rank), self._log_files[rank]) for rank in waiting]
                raise timed_out(silent, timeout_seconds, timeout_setting)
            for rank in [
                rank for rank in waiting if self._pipes[rank] in pipes
            ]:  # a failure ends the call before its peers finish
                try:
                    error, answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    raise self._describe_exits() from None
                if error is not None:
                    raise build_failure(error, self._worker(rank), self._log_files[rank])
        return [answers[rank] for rank in range(self.num_ranks)]

    def _worker(self, rank: int) -> str:
        return f"{self.name} worker {rank}"

    def _describe_exits(self) -> WorkerError:
        """Describe the ranks that exited, first the ranks ended by a signal, which are the likely cause."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        # Signals are negative statuses and therefore sorted first.
        ends = sorted(
            (end, rank) for rank, process in enumerate(self._processes) if (end := process.poll()) is not None
        )
        told = [
            f"{self._worker(rank)} died: ended {f'by signal {-end}' if end < 0 else f'with status {end}'}"
            f"{f'; {KILLED_HINT}' if end == -signal.SIGKILL else ''}\n{get_end_of_log(self._log_files[rank])}"
            for end, rank in ends
        ]
        kind = WorkerMemoryError if any(end == -signal.SIGKILL for end, _ in ends) else WorkerError
        return kind("\n".join(told) or f"the connection to a worker of {self.name} was closed")

    async def shutdown(self) -> None:
        """Close the ranks' connections, upon which they exit, and kill ranks that do not exit in time."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _EXIT_SECONDS
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kill the processes immediately."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()


def serve(pipe: Connection, name: str, log_file: str, dumps: Dumps = pickle.dumps) -> None:
    """Create a worker and serve its calls. The process exits when the connection closes, even during a call; signals to
    the process group are left to the driver.

    Args:
        name: name of this rank, for records of its waits.
        log_file: log file of this process.
    """
    report_as(name, log=log_file)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    messages = SimpleQueue[bytes]()
    # A separate thread reads, so that a crash of the driver is detected during computation or a collective.
    threading.Thread(target=_read, args=(pipe, messages), daemon=True).start()
    configure_logging()
    prepare_cpu()
    made, workers = messages.get(), []

    def answer(calls: bytes) -> bytes:
        if not workers:  # created at the first call, which reports its errors
            make_worker, args = pickle.loads(made)
            workers.append(make_worker(*args))
        answers = []
        for method, args in pickle.loads(calls):
            with waiting(method):
                answers.append(getattr(workers[0], method)(*args))
        return dumps((None, answers))

    while True:
        with waiting(NEXT_CALL, on=TRAINER):
            message = messages.get()
        answered = outcome_of(answer, message)
        pipe.send_bytes(answered if isinstance(answered, bytes) else _serialize_error(answered, dumps))


def _serialize_error(error: Exception, dumps: Dumps) -> bytes:
    """Log an error and serialize it for the driver: the exception, or its text if it cannot be pickled."""
    log_traceback(error)
    attach_raise_location(error)
    arrived = outcome_of(lambda: pickle.loads(dumps((error, []))))
    return dumps((WorkerError(f"raised {described(error)}") if isinstance(arrived, Exception) else error, []))


def _read(pipe: Connection, messages: "SimpleQueue[bytes]") -> None:
    try:
        while True:
            messages.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(ORPHANED)  # immediately: threads of collectives may wait for exited peers


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
    finally:
        traceback.print_exc()
        os._exit(1)  # immediately, even if threads of collectives are running
