"""Ranks of a worker in processes that start in a fraction of a second: `Ranks` of an actor group for tests.

    group = ActorGroup("policy", ForkedRanks("policy", MyWorker, (cfg,), num_ranks=2, log_folder=folder), ...)

A server process imports torch, transformers and the workers once; each rank is a fork of it. The ranks are real: they
have an interpreter each and meet in a process group, without Ray.
"""

import asyncio
import functools
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  the tiny models of tests; a server imports it once
from ray import cloudpickle

from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.launcher import Calls, MakeWorker
from skyrl_train.training_backends.fsdp2 import backend  # noqa: F401  for the server, too
from skyrl_train.utils.call_errors import end_of_log, failure_of, timed_out
from skyrl_train.utils.process_log import capture_output, configure_logging
from skyrl_train.utils.tracebacks import described, keep_where_raised, log_traceback
from skyrl_train.workers import policy_worker  # noqa: F401

_POLL_SECONDS = 0.05
_EXIT_SECONDS = 10.0


@functools.cache
def _server() -> Any:
    """The fork server of this process, which ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class ForkedRanks:
    """Ranks 0..N-1 of one worker class on a CPU, each a process of its own. A rank that died is a WorkerError.

    Args:
        name: of the group, in logs and errors.
        make_worker, args: what each process makes; what it cannot import is sent by value if it was registered with
            `ray.cloudpickle.register_pickle_by_value`.
        log_folder: each rank writes `<name>_<rank>.log` there.
    """

    def __init__(
        self, name: str, make_worker: MakeWorker, args: tuple[Any, ...] = (), *, num_ranks: int, log_folder: Path
    ):
        self.name = name
        self.num_ranks = num_ranks
        self._log_files = [str(log_folder / f"{name}_{rank}.log") for rank in range(num_ranks)]
        self._pipes: list[Connection] = []
        self._processes = []
        made = _dumps((make_worker, args))
        for log_file in self._log_files:
            own, theirs = _server().Pipe()
            process = _server().Process(target=_serve, args=(theirs, made, log_file), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        for rank, (pipe, own) in enumerate(zip(self._pipes, calls, strict=True)):
            try:
                pipe.send_bytes(_dumps(own))
            except OSError:
                raise self._death(rank) from None
        return await asyncio.to_thread(self._answers, timeout_seconds, timeout_setting)

    def _answers(self, timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, list[Any]] = {}
        while waiting := [rank for rank in range(self.num_ranks) if rank not in answers]:
            if time.monotonic() > deadline:
                silent = [(self._worker(rank), self._log_files[rank]) for rank in waiting]
                raise timed_out(silent, timeout_seconds, timeout_setting)
            pipes = wait([self._pipes[rank] for rank in waiting], _POLL_SECONDS)
            for rank in [rank for rank in waiting if self._pipes[rank] in pipes]:
                try:
                    error, answers[rank] = cloudpickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    raise self._death(rank) from None
                if error is not None:
                    raise failure_of(error, self._worker(rank), self._log_files[rank])
        return [answers[rank] for rank in range(self.num_ranks)]

    def _worker(self, rank: int) -> str:
        return f"{self.name} worker {rank}"

    def _death(self, rank: int) -> WorkerError:
        return WorkerError(f"{self._worker(rank)} died\n{end_of_log(self._log_files[rank])}")

    async def shutdown(self) -> None:
        """Close the ranks' pipes, upon which they exit, and kill those that have not in time."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _dumps(value: Any) -> bytes:
    return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]


def _serve(pipe: Connection, made: bytes, log_file: str) -> None:
    """Make the worker and answer calls until the pipe is closed."""
    capture_output(log_file)
    configure_logging()
    torch.set_num_threads(1)
    worker: Any = None
    while True:
        try:
            calls = pipe.recv_bytes()
        except EOFError:
            return
        try:
            if worker is None:
                make_worker, args = cloudpickle.loads(made)
                worker = make_worker(*args)
            answer = _dumps((None, [getattr(worker, method)(*args) for method, args in cloudpickle.loads(calls)]))
        except Exception as error:  # a worker may raise anything: its caller gets it
            log_traceback(error)
            keep_where_raised(error)
            try:
                answer = _dumps((error, []))
                cloudpickle.loads(answer)
            except Exception:  # some exceptions do not survive the way: their text does
                answer = _dumps((WorkerError(f"raised {described(error)}"), []))
        pipe.send_bytes(answer)
