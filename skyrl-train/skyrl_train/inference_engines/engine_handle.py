"""Engines started by this run: the engine in its own event loop, and the handle that implements its interface for
callers.

Subclasses decide where the engine runs: a Ray process (`ray_wrapped_inference_engine`) or this process
(`inline_engine`). Either way every call has a deadline, and an error names the engine.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
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
    LoraLoadRequest,
    WeightReport,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)

CONTROL = "generator.engine_control_timeout_seconds"
REQUEST = "generator.request_timeout_seconds"
START = "generator.engine_start_timeout_seconds"

TEARDOWN_SECONDS = 10.0
"""Deadline of a graceful shutdown, after which the engine is killed."""

_ANSWER_SECONDS = 1.0
"""Time that a health check waits before the engine counts as busy."""

MakeEngine = Callable[[], InferenceEngineInterface]

Args = TypeVarTuple("Args")
T = TypeVar("T")


class EngineHost:
    """Engine in its own event loop, independent of its callers' loops.

    Args:
        make_engine: creates the engine in this process.
        name: engine name in records of waits.
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
        return self._loop.call(self._record_wait("generate", self._engine.generate(request)))

    def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Awaitable[Completion]:
        caller = asyncio.get_running_loop()

        def hand_over(delta: TokenDelta) -> None:
            if self._new_tokens.is_empty:  # collect tokens of other streams in the same tick of this loop
                asyncio.get_running_loop().call_soon(self._new_tokens.flush)
            self._new_tokens.add(caller, lambda: on_tokens(delta))

        return self._loop.call(self._record_wait("generate", self._engine.stream(request, hand_over)))

    def control(self, method: str, *args: object) -> Awaitable[object]:
        """Call any other method of the engine."""
        return self._loop.call(self._record_wait(method, getattr(self._engine, method)(*args)))

    def submit(self, method: str, *args: object) -> "Future[object]":
        """Call any method of the engine, from any thread."""
        return self._loop.submit(self._record_wait(method, getattr(self._engine, method)(*args)))

    async def _record_wait(self, method: str, call: Coroutine[None, None, T]) -> T:
        with waiting(method, who=self._name):
            return await call

    async def check_health(self, patience_seconds: float) -> None:
        """Return if the engine is healthy or busy: unresponsive, but with progress within the last `patience_seconds`.

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
        """Stop the event loop and cancel its running tasks."""
        self._loop.stop()


class EngineHandle(InferenceEngineInterface):
    """Handle of an engine started by this run; applies deadlines to calls.

    Args:
        name: used in logs and errors.
        log_file: log of the engine's process.
        request_timeout_seconds: `generator.request_timeout_seconds`.
        control_timeout_seconds: `generator.engine_control_timeout_seconds`; None: the request timeout.
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

    # ---- transport

    @abstractmethod
    def start(self, method: Callable[..., object], *args: object) -> Any:
        """Start a control call. `_wait_for_answer` waits for it."""

    @abstractmethod
    async def _wait_for_answer(self, call: object, timeout_seconds: float, setting: str) -> object:
        """Wait for the result of a started call. Raises WorkerError, naming `setting`, after the deadline."""

    @abstractmethod
    async def _wait_until_started(self) -> None:
        """Wait until the engine has started, with a longer deadline than later calls."""

    # ---- the interface

    async def _call_control(self, method: Callable[[Any, *Args], Awaitable[T]], *args: *Args) -> T:
        await self._wait_until_started()
        with self._record_handle_wait(method.__name__, self.control_timeout_seconds):
            return cast(
                T, await self._wait_for_answer(self.start(method, *args), self.control_timeout_seconds, CONTROL)
            )

    def _record_handle_wait(self, what: str, timeout_seconds: float) -> AbstractContextManager[None]:
        """Record a wait for this engine."""
        return waiting(what, on=self._name, deadline=timeout_seconds)

    async def describe(self) -> EngineInfo:
        return await self._call_control(InferenceEngineInterface.describe)

    def progress(self) -> int:
        return self._num_answers

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        if mode != "wait":
            return await self._call_control(InferenceEngineInterface.pause_generation, mode)
        await self._wait_until_started()  # the awaited requests have their own deadline
        timeout = max(self._request_timeout_seconds, self.control_timeout_seconds)
        with self._record_handle_wait("pause_generation", timeout):
            await self._wait_for_answer(self.start(InferenceEngineInterface.pause_generation, mode), timeout, REQUEST)

    async def resume_generation(self) -> None:
        await self._call_control(InferenceEngineInterface.resume_generation)

    async def abort_generation(self) -> None:
        await self._call_control(InferenceEngineInterface.abort_generation)

    async def sleep(self, level: int = 1) -> None:
        await self._call_control(InferenceEngineInterface.sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._call_control(InferenceEngineInterface.wake_up, tags)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._call_control(InferenceEngineInterface.init_weight_update_communicator, init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._call_control(InferenceEngineInterface.update_named_weights, request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._call_control(InferenceEngineInterface.finish_weight_update, version)

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        return await self._call_control(InferenceEngineInterface.load_lora, request)

    async def unload_lora(self, name: str) -> None:
        await self._call_control(InferenceEngineInterface.unload_lora, name)

    async def weight_version(self) -> int:
        return await self._call_control(InferenceEngineInterface.weight_version)

    async def reset_prefix_cache(self) -> None:
        await self._call_control(InferenceEngineInterface.reset_prefix_cache)

    def log(self) -> str:
        """Return the end of the engine process's log, with a headline."""
        return get_end_of_log(self._log_file)
