"""Engines that this run starts: the engine in its own event loop, and the handle that implements its interface outside.

Subclasses decide where the engine lives: a Ray process (`ray_wrapped_inference_engine`) or this process
(`inline_engine`). Either way every call has a deadline, and an error names the engine.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar, TypeVarTuple, cast

from skyrl_gym.waits import waiting
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
    OnTokens,
    PauseMode,
    TokenDelta,
)
from skyrl_train.inference_engines.loop_thread import LoopCalls, LoopThread
from skyrl_train.utils.call_errors import get_end_of_log
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.weight_sync.base import (
    EngineHandles,
    LoraLoadRequest,
    WeightReport,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)

CONTROL = "generator.engine_control_timeout_seconds"
REQUEST = "generator.request_timeout_seconds"
START = "generator.engine_start_timeout_seconds"

TEARDOWN_SECONDS = 10.0
"""Deadline of an orderly end of an engine, which is killed after it."""

_ANSWER_SECONDS = 1.0
"""Wait of a health check for an engine before the engine counts as busy."""

MakeEngine = Callable[[], InferenceEngineInterface]

Args = TypeVarTuple("Args")
T = TypeVar("T")


class EngineHost:
    """Engine with an event loop of its own, whichever loops its callers have.

    Args:
        make_engine: creates the engine, here.
        name: of the engine, for records of its waits.
    """

    def __init__(self, make_engine: MakeEngine, name: str = "an engine"):
        self._name = name
        self._engine = make_engine()
        self._loop = LoopThread("engine")
        self._new_tokens = LoopCalls()
        self._check: asyncio.Future[None] | None = None
        self._progress = 0
        self._silent_since = 0.0

    def generate(self, request: GenerationRequest) -> Awaitable[Completion]:
        return self._loop.call(self._recorded("generate", self._engine.generate(request)))

    def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Awaitable[Completion]:
        caller = asyncio.get_running_loop()

        def hand_over(delta: TokenDelta) -> None:
            if self._new_tokens.is_empty:  # tokens of other streams come in the same tick of this loop
                asyncio.get_running_loop().call_soon(self._new_tokens.flush)
            self._new_tokens.add(caller, lambda: on_tokens(delta))

        return self._loop.call(self._recorded("generate", self._engine.stream(request, hand_over)))

    def control(self, method: str, *args: object) -> Awaitable[object]:
        """Call any other method of the engine."""
        return self._loop.call(self._recorded(method, getattr(self._engine, method)(*args)))

    def submit(self, method: str, *args: object) -> "Future[object]":
        """Call any method of the engine, from any thread."""
        return self._loop.submit(self._recorded(method, getattr(self._engine, method)(*args)))

    async def _recorded(self, method: str, call: Coroutine[None, None, T]) -> T:
        with waiting(method, who=self._name):
            return await call

    async def check_health(self, patience_seconds: float) -> None:
        """Return if the engine is well, or busy: not answering yet, for less than `patience_seconds` since it was last
        seen to make progress.

        Raises:
            WorkerError: the engine has failed or hangs.
        """
        now, progress = asyncio.get_running_loop().time(), self._engine.progress()
        if self._check is None or self._check.get_loop() is not asyncio.get_running_loop():
            self._check = self._loop.call(self._engine.check_health())
            self._silent_since = now
        if progress != self._progress:
            self._progress, self._silent_since = progress, now
        check = self._check
        await asyncio.wait({check}, timeout=_ANSWER_SECONDS)
        if check.done():
            self._check = None
            return check.result()
        if now - self._silent_since > patience_seconds:
            hangs = (
                f"the engine hangs: it neither answered nor computed anything for {patience_seconds:g} s ({CONTROL})"
            )
            raise WorkerError(hangs + await asyncio.to_thread(write_explanation, f"{self._name}: {hangs}"))

    def stop(self) -> None:
        """End the event loop; what still runs in it is cancelled."""
        self._loop.stop()


class EngineHandle(InferenceEngineInterface):
    """Handle of an engine that this run has started: calls with deadlines.

    Args:
        name: used in logs and errors.
        log_file: log of the engine's process.
        request_timeout_seconds: `generator.request_timeout_seconds`.
        control_timeout_seconds: `generator.engine_control_timeout_seconds`; None: that of requests.
        start_timeout_seconds: `generator.engine_start_timeout_seconds`, for the first call; None: control timeout.
    """

    def __init__(
        self,
        name: str,
        log_file: str,
        request_timeout_seconds: float,
        control_timeout_seconds: float | None = None,
        start_timeout_seconds: float | None = None,
    ):
        self._name = name
        self._log_file = log_file
        self._request_timeout_seconds = request_timeout_seconds
        self.control_timeout_seconds = control_timeout_seconds or request_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds or self.control_timeout_seconds
        self._num_answers = 0

    @property
    def name(self) -> str:
        return self._name

    # ---- where the engine lives

    @abstractmethod
    def start(self, method: Callable[..., object], *args: object) -> Any:
        """Start a control call from any thread. `wait_for_all` and `_answer` wait for it."""

    @abstractmethod
    def wait_for_all(self, calls: Sequence[object], timeout_seconds: float) -> list[object]:
        """Block until calls of this and other engines of its kind are answered; return the answers in order.

        Raises:
            WorkerError: an engine failed, or the deadline passed.
        """

    @abstractmethod
    async def _answer(self, call: object, timeout_seconds: float, setting: str) -> object:
        """Return the answer of one started call. Raises WorkerError after the deadline, whose setting is `setting`."""

    @abstractmethod
    async def _started(self) -> None:
        """Wait for the engine's start, which has a longer deadline than later calls."""

    # ---- the interface

    async def _control(self, method: Callable[[Any, *Args], Awaitable[T]], *args: *Args) -> T:
        await self._started()
        with self._awaited(method.__name__, self.control_timeout_seconds):
            return cast(T, await self._answer(self.start(method, *args), self.control_timeout_seconds, CONTROL))

    def _awaited(self, what: str, timeout_seconds: float) -> AbstractContextManager[None]:
        """Record a wait for this engine."""
        return waiting(what, on=self._name, deadline=timeout_seconds)

    async def describe(self) -> EngineInfo:
        return await self._control(InferenceEngineInterface.describe)

    def progress(self) -> int:
        return self._num_answers

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        if mode != "wait":
            return await self._control(InferenceEngineInterface.pause_generation, mode)
        await self._started()  # the requests that it waits for have their own deadline
        timeout = max(self._request_timeout_seconds, self.control_timeout_seconds)
        with self._awaited("pause_generation", timeout):
            await self._answer(self.start(InferenceEngineInterface.pause_generation, mode), timeout, REQUEST)

    async def resume_generation(self) -> None:
        await self._control(InferenceEngineInterface.resume_generation)

    async def abort_generation(self) -> None:
        await self._control(InferenceEngineInterface.abort_generation)

    async def sleep(self, level: int = 1) -> None:
        await self._control(InferenceEngineInterface.sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._control(InferenceEngineInterface.wake_up, tags)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._control(InferenceEngineInterface.init_weight_update_communicator, init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._control(InferenceEngineInterface.update_named_weights, request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._control(InferenceEngineInterface.finish_weight_update, version)

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        return await self._control(InferenceEngineInterface.load_lora, request)

    async def unload_lora(self, name: str) -> None:
        await self._control(InferenceEngineInterface.unload_lora, name)

    async def weight_version(self) -> int:
        return await self._control(InferenceEngineInterface.weight_version)

    async def reset_prefix_cache(self) -> None:
        await self._control(InferenceEngineInterface.reset_prefix_cache)

    def log(self) -> str:
        """Return the end of the log of the engine's process, with a headline."""
        return get_end_of_log(self._log_file)


class LocalEngines(EngineHandles):
    """All engines of the run, for the weight sender beside the policy.

    Args:
        engines: handles of one class.
    """

    def __init__(self, engines: Sequence[EngineHandle]):
        self._engines = list(engines)
        self.num_engines = len(engines)

    def start(self, index: int, method: Callable[..., object], *args: object) -> Any:
        return self._engines[index].start(method, *args)

    def wait(self, calls: list[Any]) -> list[Any]:
        timeout = max(engine.control_timeout_seconds for engine in self._engines)
        names = ", ".join(engine.name for engine in self._engines)
        with waiting("the weights to arrive", on=names, deadline=timeout):
            return self._engines[0].wait_for_all(calls, timeout)
