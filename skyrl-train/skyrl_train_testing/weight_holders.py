"""The smallest engines there are: they hold parameters, receive new ones and prove it. In this process or in their own.

For tests and benchmarks of weight sync with neither Ray nor a model.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.weight_sync.base import EngineHandles, WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
from skyrl_train.weight_sync.lockstep import PolicyRanks
from skyrl_train.weight_sync.receiver import WeightReceiver

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HolderInfo:
    """Properties of an engine that `init_infos_for` reads."""

    backend: str = "native"
    num_weight_processes: int = 1
    node: str | None = None
    gpus: Sequence[str] = ()
    unsupported: Mapping[Any, str] = field(default_factory=dict)


class WeightHolder:
    """Parameters, and the calls that a weight sender makes.

    Args:
        parameters: written to in place.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], device: torch.device = CPU):
        self.parameters = dict(parameters)
        self.version = 0
        self._device = device
        self._verification: Verification = "off"
        self._updated: list[str] = []
        self.receiver: WeightReceiver | None = None

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> Self:
        """Make tensors of ones. Called in the engine's process: tensors that travel there would share their memory with
        the trainer's."""
        return cls((name, torch.ones(shape, dtype=dtype)) for name, shape in shapes)

    def weight_version(self) -> int:
        return self.version

    def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = WeightReceiver(init_info, self._device)
        self._verification = init_info.verification

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        assert self.receiver is not None
        bucket = self.receiver.receive(request)
        if request.index == 0:
            self._updated = []
        for name, tensor in bucket:
            self.parameters[name].copy_(tensor)
            self._updated.append(name)

    def finish_weight_update(self, version: int) -> WeightReport:
        assert self.receiver is not None
        self.receiver.finish(version)
        self.version = version
        held = [(name, self.parameters[name]) for name in self._updated]
        return WeightReport(version=version, fingerprints=fingerprints_of(held, version, self._verification))


class HoldersInThreads(EngineHandles):
    """Engines of this process, each in a thread."""

    def __init__(self, holders: Sequence[Any], timeout_seconds: float = 20.0):
        self._holders = list(holders)
        self._timeout_seconds = timeout_seconds
        self._threads = [ThreadPoolExecutor(1) for _ in holders]
        self.num_engines = len(self._holders)

    def start(self, index: int, method: Callable[..., object], *args: object) -> Future[Any]:
        return self._threads[index].submit(getattr(self._holders[index], method.__name__), *args)

    def wait(self, calls: list[Future[Any]]) -> list[Any]:
        done, pending = wait_for_futures(calls, self._timeout_seconds, FIRST_EXCEPTION)
        for index, call in enumerate(calls):
            if call in done and isinstance(error := call.exception(), SkyRLError):
                raise type(error)(f"engine {index}: {error}") from error
        if pending:
            silent = [index for index, call in enumerate(calls) if call in pending]
            raise WorkerError(f"engines {silent} did not answer within {self._timeout_seconds:g} s")
        return [call.result() for call in calls]


class RanksInThreads:
    """Ranks of a policy, each in a thread of this process.

    Args:
        timeout_seconds: the longest that one rank waits for the others in a collective.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 20.0):
        self.world_size = world_size
        self._meeting = threading.Barrier(world_size, timeout=timeout_seconds)
        self._given: list[Any] = [None] * world_size

    def run(self, function: Callable[["RankInThread"], object]) -> list[Any]:
        """Call a function on every rank. Returns: what each of them returned or raised, in rank order."""
        with ThreadPoolExecutor(self.world_size) as threads:
            calls = [threads.submit(function, RankInThread(self, rank)) for rank in range(self.world_size)]
            return [call.exception() or call.result() for call in calls]

    def meet(self, rank: int, own: object) -> list[Any]:
        self._given[rank] = own
        self._meeting.wait()
        of_ranks = list(self._given)
        self._meeting.wait()  # nobody gives anything new before all have seen this
        return of_ranks


class RankInThread(PolicyRanks):
    """One of `RanksInThreads`, as it sees them."""

    def __init__(self, ranks: RanksInThreads, rank: int):
        super().__init__(rank, ranks.world_size)
        self._ranks = ranks

    def all_gather(self, own: object) -> list[Any]:
        return self._ranks.meet(self.rank, own)


class HolderProcesses(EngineHandles):
    """Engines in separate processes; leaving the context stops them.

    Args:
        make_holder: factory of an engine, importable in its process.
    """

    def __init__(self, count: int, make_holder: Callable[[], Any], timeout_seconds: float = 60.0):
        self._timeout_seconds = timeout_seconds
        self._num_calls = 0
        self.num_engines = count
        self._make_holder = make_holder
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(count):
            pipe, process = self._start_process()
            self._pipes.append(pipe)
            self.processes.append(process)

    def wait_for_start(self, timeout_seconds: float = 120.0) -> None:
        """Wait until all processes answer: imports take longer than calls."""
        usual, self._timeout_seconds = self._timeout_seconds, timeout_seconds
        self.wait(self.call_all(WeightHolder.weight_version))
        self._timeout_seconds = usual

    def restart(self, index: int) -> None:
        """Terminate a process, if it is alive, and start a replacement."""
        self.processes[index].kill()
        self.processes[index].join(10)
        self._pipes[index], self.processes[index] = self._start_process()
        self.wait_for_start()

    def _start_process(self) -> tuple[Connection, Any]:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self._make_holder), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def __enter__(self) -> "HolderProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for process in self.processes:
            process.kill()
            process.join(10)

    def wait(self, calls: list[tuple[int, int]]) -> list[Any]:
        deadline = time.monotonic() + self._timeout_seconds
        open_calls = dict(calls)
        answers: dict[int, Any] = {}
        while open_calls:
            of_pipe = {self._pipes[index]: index for index in open_calls}
            ready = wait(list(of_pipe), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"engines {sorted(open_calls)} did not answer within {self._timeout_seconds:g} s")
            for pipe in ready:
                index = of_pipe[pipe]  # type: ignore[index]
                try:
                    number, answer = self._pipes[index].recv()
                except (EOFError, ConnectionError):
                    self.processes[index].join(10)
                    code = self.processes[index].exitcode
                    raise WorkerError(f"engine {index} died (exit code {code})") from None
                if number != open_calls[index]:
                    continue  # of a call that was given up
                if isinstance(answer, SkyRLError):
                    raise type(answer)(f"engine {index}: {answer}")
                if isinstance(answer, Exception):
                    raise WorkerError(f"engine {index} raised {type(answer).__name__}: {answer}")
                answers[index] = answer
                del open_calls[index]
        return [answers[index] for index, _ in calls]

    def start(self, index: int, method: Callable[..., object], *args: object) -> tuple[int, int]:
        self._num_calls += 1
        with suppress(ConnectionError):  # the wait says who died
            self._pipes[index].send((self._num_calls, method.__name__, args))
        return index, self._num_calls


def _serve(pipe: Connection, make_holder: Callable[[], Any]) -> None:
    """Execute calls sequentially until the other end is closed."""
    torch.set_num_threads(1)
    holder = make_holder()
    while True:
        try:
            number, method, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = getattr(holder, method)(*args)
        except Exception as error:  # every one is the caller's
            answer = error
        try:
            pipe.send((number, answer))
        except ConnectionError:
            return
