"""Rollout engines in Ray processes: the engine in its process, and a handle with its interface for callers."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import Completion, GenerationRequest, InferenceEngineInterface, OnTokens
from skyrl_train.inference_engines.batched_calls import Outcomes, Requests, RequestSender, RequestServer
from skyrl_train.inference_engines.engine_handle import (
    CONTROL,
    REQUEST,
    START,
    TEARDOWN_SECONDS,
    EngineHandle,
    EngineHost,
    MakeEngine,
)
from skyrl_train.utils.call_errors import build_failure, timed_out
from skyrl_train.utils.ray_calls import Call, prepare_errors_for_caller, stop_actors, wait_for_result
from skyrl_train.utils.ray_process import prepare_process

_KILL_SECONDS = 30.0
_CONTROL_GROUP = "control"
_CALLS_AT_A_TIME = 10_000
"""Maximum number of concurrent calls of `EngineProcess.exchange`; further calls wait in the process."""
_CONTROL_CALLS_AT_A_TIME = 1_000
"""Maximum number of concurrent control calls. Some are long: a pause that waits for requests, an adapter unloaded after
its last request.
"""


def build_engine_actor(cls: "type[EngineProcess] | None" = None, **options: object) -> Any:
    """Build a Ray actor class from `EngineProcess`. Control calls have a separate concurrency group, so they never
    queue behind requests.

    Args:
        cls: subclass of `EngineProcess`.
        options: Ray's actor options.
    """
    declare: Any = ray.remote  # Ray's types lack concurrency groups
    actor = declare(concurrency_groups={_CONTROL_GROUP: _CONTROL_CALLS_AT_A_TIME})(cls or EngineProcess)
    return actor.options(**({"max_concurrency": _CALLS_AT_A_TIME} | options))


@dataclass(frozen=True)
class ProcessLocation:
    """Node, id and start time of a process (ids are reused)."""

    node: str
    pid: int
    created: float


class EngineProcess(EngineHost):
    """Engine in a separate process, created by `build_engine_actor`.

    Ray runs each concurrency group of an actor in a separate event loop; the engine has one loop for all of them.

    Args:
        make_engine: creates the engine in that process.
        log_file: log file of the process.
        name: engine name in records of waits.
    """

    def __init__(self, make_engine: MakeEngine, log_file: str, name: str = "an engine"):
        prepare_process(log_file, name)
        with contextlib.suppress(PermissionError):  # it leads a group already
            os.setpgid(0, 0)  # its children can be found after it has exited
        with prepare_errors_for_caller():
            super().__init__(make_engine, name)
        self._server = RequestServer(self._handle_request)

    async def exchange(self, sender: str, new: Requests, withdrawn: list[int]) -> Outcomes:
        """See `RequestServer.exchange`, which runs in the engine's event loop."""
        return await self._loop.call(self._server.exchange(sender, new, withdrawn))

    async def _handle_request(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        engine = self._engine
        with prepare_errors_for_caller():
            answer = engine.generate(request) if on_tokens is None else engine.stream(request, on_tokens)
            return await self._record_wait("generate", answer)

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def control(self, method: str, *args: object) -> object:
        with prepare_errors_for_caller():
            return await super().control(method, *args)

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def check_health(self, patience_seconds: float) -> None:
        await super().check_health(patience_seconds)

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def place(self) -> ProcessLocation:
        process = psutil.Process()
        return ProcessLocation(ray.get_runtime_context().get_node_id(), process.pid, process.create_time())


class RayWrappedInferenceEngine(EngineHandle):
    """Handle of an engine in another process. A crashed process raises WorkerError.

    Args:
        actor: an `EngineProcess` actor from `build_engine_actor`.
        more: see `EngineHandle`.
    """

    def __init__(self, actor: Any, *more: Any, **settings: Any):
        super().__init__(*more, **settings)
        self._actor = actor
        self._place: ProcessLocation | None = None
        self._senders: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestSender] = WeakKeyDictionary()

    def start(self, method: Callable[..., object], *args: object) -> Call:
        return self._to_call(self._actor.control.remote(method.__name__, *args))

    def _to_call(self, reference: Any) -> Call:
        return Call(reference, self._name, self._log_file)

    async def _wait_for_answer(self, call: Call, timeout_seconds: float, setting: str) -> object:
        return await wait_for_result(call, timeout_seconds, setting)

    async def _wait_until_started(self) -> None:
        if self._place is None:
            call = self._to_call(self._actor.place.remote())
            with self._record_handle_wait("its start", self._start_timeout_seconds):
                self._place = await wait_for_result(call, self._start_timeout_seconds, START)

    async def check_health(self) -> None:
        await self._wait_until_started()
        call = self._to_call(self._actor.check_health.remote(self.control_timeout_seconds))
        await wait_for_result(call, self.control_timeout_seconds, CONTROL)

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._send_request(request, None)

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        return await self._send_request(request, on_tokens)

    async def _send_request(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        await self._wait_until_started()
        loop, seconds = asyncio.get_running_loop(), self._request_timeout_seconds
        if (sender := self._senders.get(loop)) is None:
            sender = self._senders[loop] = RequestSender(self._call_exchange)
        deadline = asyncio.timeout(seconds)
        try:
            with self._record_handle_wait("generate", seconds):
                async with deadline:
                    completion = await sender.send(request, on_tokens)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise timed_out([(self._name, self._log_file)], seconds, REQUEST) from None
        self._num_answers += 1
        return completion

    def _call_exchange(self, sender: str, new: Requests, withdrawn: list[int]) -> Coroutine[None, None, Outcomes]:
        call = self._to_call(self._actor.exchange.remote(sender, new, withdrawn))
        return self._receive_outcomes(call)

    async def _receive_outcomes(self, call: Call) -> Outcomes:
        try:
            outcomes = await call.reference
        except RayError as error:
            raise call.failure(error) from error
        return {
            number: build_failure(outcome, self._name, self._log_file) if isinstance(outcome, Exception) else outcome
            for number, outcome in outcomes.items()
        }

    async def teardown(self) -> None:
        """Shut the engine down gracefully within `TEARDOWN_SECONDS`, then kill the remaining processes."""
        with contextlib.suppress(WorkerError):
            await wait_for_result(self.start(InferenceEngineInterface.teardown), TEARDOWN_SECONDS, CONTROL)
        await asyncio.to_thread(self._stop_process)

    def _stop_process(self) -> None:
        """Ask the process to exit, wait, and kill it and its children if they are left."""
        stop_actors([self._actor])
        self._kill_remaining()

    def place(self) -> ProcessLocation:
        """Return node and id of the process, after waiting for its start."""
        if self._place is None:
            self._place = ray.get(self._actor.place.remote(), timeout=self._start_timeout_seconds)
        assert self._place is not None
        return self._place

    def pid(self) -> int:
        return self.place().pid

    def kill(self) -> None:
        """Kill the engine's process and its descendants."""
        ray.kill(self._actor)  # also before its process id is known
        self._kill_remaining()

    def _kill_remaining(self) -> None:
        if self._place is None:
            return
        if self._place.node == ray.get_runtime_context().get_node_id():
            kill_tree(self._place)
            return
        there = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
        with contextlib.suppress(RayError, GetTimeoutError):  # if the node is lost, so is the process
            ray.get(
                ray.remote(kill_tree).options(num_cpus=0, scheduling_strategy=there).remote(self._place),
                timeout=_KILL_SECONDS,
            )


def kill_tree(place: ProcessLocation) -> None:
    """Kill a process group leader on this machine, its group and its descendants. Members of the group may outlive the
    leader.
    """
    victims = [process for process in psutil.process_iter() if _get_process_group(process.pid) == place.pid]
    try:
        leader = psutil.Process(place.pid)
        if leader.create_time() != place.created:
            return  # the process id was reused
        victims += [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        pass
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, timeout=_KILL_SECONDS)


def _get_process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
