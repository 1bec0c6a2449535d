"""Rollout engines in Ray processes: the engine in its process, and a handle that looks like the engine from outside."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import (
    EngineInfo,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.utils.process_log import log_tail
from skyrl_train.utils.ray_calls import Call, answer_of, end_actors, errors_for_caller, wait_for_all
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

_TEARDOWN_SECONDS = 10.0
"""How long an engine may take to end in order before it is killed."""

_KILL_SECONDS = 30.0
_ANSWER_SECONDS = 1.0
"""How long a health check waits for an engine before it says that the engine is busy."""

_CONTROL = "generator.engine_control_timeout_seconds"
_CONTROL_GROUP = "control"
_REQUESTS_AT_A_TIME = 10_000
"""Calls of `EngineProcess.generate` that Ray runs at a time; further ones wait in the process, behind these alone."""
_CONTROL_CALLS_AT_A_TIME = 1_000
"""Some of them take long: a pause that waits for requests, an adapter that is unloaded when nothing uses it."""


def engine_actor(cls: "type[EngineProcess] | None" = None, **options: Any) -> Any:
    """`EngineProcess` as a Ray actor class. Control calls have a concurrency group of their own, so that none of them
    queues behind requests, however many there are.

    Args:
        cls: a subclass of it.
        options: Ray's.
    """
    declare: Any = ray.remote  # whose types do not know of groups
    actor = declare(concurrency_groups={_CONTROL_GROUP: _CONTROL_CALLS_AT_A_TIME})(cls or EngineProcess)
    return actor.options(**({"max_concurrency": _REQUESTS_AT_A_TIME} | options))


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process runs, and since when (process ids come again)."""

    node: str
    pid: int
    created: float


class EngineProcess:
    """An engine in a process of its own. Made by `engine_actor`.

    Ray runs each concurrency group of an actor in an event loop of its own; the engine has one loop for all of them.

    Args:
        make_engine: creates the engine, there.
        log_file: where the process writes.
    """

    def __init__(self, make_engine: Callable[[], InferenceEngineInterface], log_file: str):
        from skyrl_train.orchestration.actor_group import prepare_process

        prepare_process(log_file)
        with contextlib.suppress(PermissionError):  # it leads a group already
            os.setpgid(0, 0)  # what it starts can be found when it is dead itself
        with errors_for_caller():
            self._engine = make_engine()
        self._loop = LoopThread("engine")
        self._check: asyncio.Task[None] | None = None
        self._progress = 0
        self._silent_since = 0.0

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        with errors_for_caller():
            return await self._loop.call(self._engine.generate(input_batch))

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def control(self, method: str, *args: Any) -> Any:
        """Calls any other method of the engine."""
        with errors_for_caller():
            return await self._loop.call(getattr(self._engine, method)(*args))

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def check_health(self, patience_seconds: float) -> None:
        """Return if the engine is well, or busy: not answering yet, for less than `patience_seconds` since it was last
        seen to make progress.

        Raises:
            WorkerError: the engine has failed or hangs.
        """
        now, progress = asyncio.get_running_loop().time(), self._engine.progress()
        if self._check is None:
            self._check = asyncio.ensure_future(self._loop.call(self._engine.check_health()))
            self._silent_since = now
        if progress != self._progress:
            self._progress, self._silent_since = progress, now
        check = self._check
        await asyncio.wait({check}, timeout=_ANSWER_SECONDS)
        if check.done():
            self._check = None
            return check.result()
        if now - self._silent_since > patience_seconds:
            raise WorkerError(
                f"the engine hangs: it neither answered nor computed anything for {patience_seconds:g} s ({_CONTROL})"
            )

    @ray.method(concurrency_group=_CONTROL_GROUP)
    async def place(self) -> ProcessPlace:
        process = psutil.Process()
        return ProcessPlace(ray.get_runtime_context().get_node_id(), process.pid, process.create_time())


class RayWrappedInferenceEngine(InferenceEngineInterface):
    """An engine that runs in another process. Every call has a deadline; a dead process is a WorkerError.

    Args:
        actor: an `EngineProcess`, made of `engine_actor`.
        name: in logs and errors.
        log_file: where the process writes.
        request_timeout_seconds: `generator.request_timeout_seconds`.
        control_timeout_seconds: `generator.engine_control_timeout_seconds`; None: as for requests.
        start_timeout_seconds: `generator.engine_start_timeout_seconds`, for the first call; None: as for control calls.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        log_file: str,
        request_timeout_seconds: float,
        control_timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
    ):
        self._actor = actor
        self._name = name
        self._log_file = log_file
        self._request_timeout_seconds = request_timeout_seconds
        self.control_timeout_seconds = control_timeout_seconds or request_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds or self.control_timeout_seconds
        self._place: ProcessPlace | None = None
        self._num_answers = 0

    def start(self, method: str, *args: Any) -> Call:
        """Start a control call; see `skyrl_train.utils.ray_calls` for waiting."""
        return self._named(self._actor.control.remote(method, *args))

    def _named(self, reference: Any) -> Call:
        return Call(reference, self._name, self._log_file)

    async def _started(self) -> None:
        """Waits for the engine's start, which may take longer than what is asked of it afterwards."""
        if self._place is None:
            call = self._named(self._actor.place.remote())
            self._place = await answer_of(call, self._start_timeout_seconds, "generator.engine_start_timeout_seconds")

    async def _control(self, method: str, *args: Any) -> Any:
        await self._started()
        return await answer_of(self.start(method, *args), self.control_timeout_seconds, _CONTROL)

    async def describe(self) -> EngineInfo:
        return await self._control("describe")

    async def check_health(self) -> None:
        await self._started()
        call = self._named(self._actor.check_health.remote(self.control_timeout_seconds))
        await answer_of(call, self.control_timeout_seconds, _CONTROL)

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        await self._started()
        call = self._named(self._actor.generate.remote(input_batch))
        try:
            output = await answer_of(call, self._request_timeout_seconds, "generator.request_timeout_seconds")
        except (asyncio.CancelledError, WorkerError):
            ray.cancel(call.reference)  # nobody waits: the engine need not go on
            raise
        self._num_answers += 1
        return output

    def progress(self) -> int:
        return self._num_answers

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        if mode != "wait":
            return await self._control("pause_generation", mode)
        await self._started()  # the requests that it waits for have their own deadline
        timeout = max(self._request_timeout_seconds, self.control_timeout_seconds)
        await answer_of(self.start("pause_generation", mode), timeout, "generator.request_timeout_seconds")

    async def resume_generation(self) -> None:
        await self._control("resume_generation")

    async def abort_generation(self) -> None:
        await self._control("abort_generation")

    async def sleep(self, level: int = 1) -> None:
        await self._control("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._control("wake_up", tags)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._control("init_weight_update_communicator", init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._control("update_named_weights", request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._control("finish_weight_update", version)

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        return await self._control("load_lora", request)

    async def unload_lora(self, name: str) -> None:
        await self._control("unload_lora", name)

    async def weight_version(self) -> int:
        return await self._control("weight_version")

    async def reset_prefix_cache(self) -> None:
        await self._control("reset_prefix_cache")

    async def teardown(self) -> None:
        """Lets the engine end in order, for a moment, and then ends whatever is left of it."""
        with contextlib.suppress(WorkerError):
            await answer_of(self.start("teardown"), _TEARDOWN_SECONDS, _CONTROL)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Ask the process to exit, wait, and kill whatever of it or its children is left."""
        end_actors([self._actor])
        self._kill_rest()

    def log(self) -> str:
        """The end of the process's log, with a headline."""
        return f"--- end of {self._log_file}:\n{log_tail(self._log_file)}"

    def place(self) -> ProcessPlace:
        """Where it runs; waits for its start."""
        if self._place is None:
            self._place = ray.get(self._actor.place.remote(), timeout=self._start_timeout_seconds)
        assert self._place is not None
        return self._place

    def pid(self) -> int:
        return self.place().pid

    def kill(self) -> None:
        """Ends the engine's process and everything that it started, whatever state they are in."""
        ray.kill(self._actor)  # also one of which nothing is known yet
        self._kill_rest()

    def _kill_rest(self) -> None:
        if self._place is None:
            return
        if self._place.node == ray.get_runtime_context().get_node_id():
            kill_tree(self._place)
            return
        there = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
        with contextlib.suppress(RayError, GetTimeoutError):  # with its node, the process is gone as well
            ray.get(
                ray.remote(kill_tree).options(num_cpus=0, scheduling_strategy=there).remote(self._place),
                timeout=_KILL_SECONDS,
            )


def kill_tree(place: ProcessPlace) -> None:
    """Kills a process of this machine that leads a group, its group and its descendants. One that is gone already may
    have left some of its group."""
    victims = [process for process in psutil.process_iter() if _group_of(process.pid) == place.pid]
    try:
        leader = psutil.Process(place.pid)
        if leader.create_time() != place.created:
            return  # another process has got its number
        victims += [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        pass
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(victims, timeout=_KILL_SECONDS)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


class RayEngines:
    """All engines, for the weight sender in the policy's process (`skyrl_train.weight_sync.sender.EngineHandles`)."""

    def __init__(self, engines: Sequence[RayWrappedInferenceEngine]):
        self._engines = list(engines)

    def call_all(self, method: str, *args: Any) -> list[Call]:
        return [engine.start(method, *args) for engine in self._engines]

    def call_each(self, method: str, args: Sequence[Any]) -> list[Call]:
        return [engine.start(method, arg) for engine, arg in zip(self._engines, args, strict=True)]

    def wait(self, calls: list[Call]) -> list[Any]:
        timeout = max(engine.control_timeout_seconds for engine in self._engines)
        return wait_for_all(calls, timeout, _CONTROL)
