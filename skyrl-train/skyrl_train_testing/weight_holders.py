"""The smallest engines there are: they hold parameters, receive new ones and prove it. In this process or in their own.

For tests and benchmarks of weight sync with neither Ray nor a model.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest, WeightUpdates
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
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
    def of_shapes(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device = CPU
    ) -> Self:
        """Make tensors of ones. Called in the engine's process: tensors that travel there would share their memory with
        the trainer's."""
        return cls(((name, torch.ones(shape, dtype=dtype, device=device)) for name, shape in shapes), device)

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


class HolderEngine(WeightUpdates):
    """An engine that holds parameters elsewhere, called one call after the other.

    Args:
        call: calls a method of the holder by name and blocks until it has answered.
        timeout_seconds: deadline of a call.
    """

    def __init__(self, index: int, call: Callable[..., Any], timeout_seconds: float):
        self._name, self._call, self._timeout_seconds = f"engine {index}", call, timeout_seconds
        self._thread = ThreadPoolExecutor(1)

    async def weight_version(self) -> int:
        return await self._answer("weight_version")

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._answer("init_weight_update_communicator", init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._answer("update_named_weights", request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._answer("finish_weight_update", version)

    async def _answer(self, method: str, *args: object) -> Any:
        answer = asyncio.wrap_future(self._thread.submit(self._call, method, *args))
        done, _ = await asyncio.wait([answer], timeout=self._timeout_seconds)
        if not done:
            raise WorkerError(f"{self._name} did not answer within {self._timeout_seconds:g} s")
        try:
            return answer.result()
        except SkyRLError as error:
            raise type(error)(f"{self._name}: {error}") from error


def engines_in_threads(holders: Sequence[Any], timeout_seconds: float = 20.0) -> list[HolderEngine]:
    """Return engines of this process, each in a thread."""

    def call(holder: Any) -> Callable[..., Any]:
        return lambda method, *args: getattr(holder, method)(*args)

    return [HolderEngine(index, call(holder), timeout_seconds) for index, holder in enumerate(holders)]


class HolderProcesses:
    """Engines in separate processes; leaving the context stops them.

    Args:
        make_holder: factory of an engine, importable in its process.

    Attributes:
        engines: the engines, for a sender.
    """

    def __init__(self, count: int, make_holder: Callable[[], Any], timeout_seconds: float = 60.0):
        self._timeout_seconds = timeout_seconds
        self._make_holder = make_holder
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.engines: list[HolderEngine] = []
        for index in range(count):
            pipe, process = self._start_process()
            self._pipes.append(pipe)
            self.processes.append(process)
            self.engines.append(self._make_engine(index))

    def wait_for_start(self) -> None:
        """Wait until all processes answer: imports take longer than calls."""
        for index in range(len(self.processes)):
            self.call(index, "weight_version")

    def call(self, index: int, method: str, *args: object) -> Any:
        """Call a method of a holder and wait for its answer."""
        pipe = self._pipes[index]
        try:
            pipe.send((method, args))
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            self.processes[index].join(10)
            raise WorkerError(f"died (exit code {self.processes[index].exitcode})") from None
        if isinstance(answer, SkyRLError):
            raise answer
        if isinstance(answer, Exception):
            raise WorkerError(f"raised {type(answer).__name__}: {answer}")
        return answer

    def call_all(self, method: str, *args: object) -> list[Any]:
        return [self.call(index, method, *args) for index in range(len(self.processes))]

    def restart(self, index: int) -> None:
        """Terminate a process, if it is alive, and start a replacement."""
        self.processes[index].kill()
        self.processes[index].join(10)
        self._pipes[index], self.processes[index] = self._start_process()
        self.engines[index] = self._make_engine(index)
        self.wait_for_start()

    def _make_engine(self, index: int) -> HolderEngine:
        return HolderEngine(index, lambda *call: self.call(index, *call), self._timeout_seconds)

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


def _serve(pipe: Connection, make_holder: Callable[[], Any]) -> None:
    """Execute calls sequentially until the other end is closed."""
    torch.set_num_threads(1)
    holder = make_holder()
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = getattr(holder, method)(*args)
        except Exception as error:  # every one is the caller's
            answer = error
        with suppress(ConnectionError):
            pipe.send(answer)
