"""Rollout engines in this process, used by `trainer.placement.launcher=inline`. Does not import Ray."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import Completion, GenerationRequest, InferenceEngineInterface, OnTokens
from skyrl_train.inference_engines.engine_handle import (
    CONTROL,
    REQUEST,
    START,
    TEARDOWN_SECONDS,
    EngineHandle,
    EngineHost,
)
from skyrl_train.inference_engines.loop_thread import LoopStopped, wrap_in_running_loop
from skyrl_train.utils.call_errors import build_failure, timed_out


@dataclass(frozen=True)
class InlineCall:
    """Control call in flight, and its engine."""

    answer: "Future[object]"
    engine: "InlineEngine"


class InlineEngine(EngineHandle):
    """Handle of an engine in this process, with the same deadlines as in a separate process.

    Args:
        host: future of the engine, which may still be loading its model.
        more: see `EngineHandle`.
    """

    def __init__(self, host: "Future[EngineHost]", *more: Any, **settings: Any):
        super().__init__(*more, **settings)
        self._host = host
        self._has_ended = threading.Event()

    def start(self, method: Callable[..., object], *args: object) -> InlineCall:
        answer: Future[object] = Future()
        if self._has_ended.is_set():
            answer.set_exception(LoopStopped())
        elif not self._host.done():
            answer.set_exception(WorkerError("has not started yet"))
        elif (error := self._host.exception()) is not None:
            answer.set_exception(error)
        else:
            answer = self._host.result().submit(method.__name__, *args)
        return InlineCall(answer, self)

    async def _wait_for_answer(self, call: InlineCall, timeout_seconds: float, setting: str) -> object:
        async with self._apply_deadline(timeout_seconds, setting):
            return await wrap_in_running_loop(call.answer)

    @contextlib.asynccontextmanager
    async def _apply_deadline(self, timeout_seconds: float, setting: str) -> AsyncIterator[None]:
        """Raise errors and timeouts of the block with the name of this engine."""
        deadline = asyncio.timeout(timeout_seconds)
        try:
            async with deadline:
                yield
        except Exception as error:  # as in `_result`
            if deadline.expired():
                raise timed_out([(self._name, self._log_file)], timeout_seconds, setting) from None
            raise self._build_failure(error) from error

    def _build_failure(self, error: Exception) -> Exception:
        if isinstance(error, (LoopStopped, CancelledError)):
            return WorkerError(f"{self._name} has ended")
        return build_failure(error, self._name, self._log_file)

    async def _wait_until_started(self) -> None:
        if not self._host.done():
            seconds = self._start_timeout_seconds
            with self._record_handle_wait("its start", seconds):
                async with self._apply_deadline(seconds, START):
                    await asyncio.shield(asyncio.wrap_future(self._host))

    async def check_health(self) -> None:
        await self._wait_until_started()
        async with self._apply_deadline(self.control_timeout_seconds, CONTROL):
            await self._host.result().check_health(self.control_timeout_seconds)

    async def generate(self, request: GenerationRequest) -> Completion:
        async with self._run_request() as host:
            return await host.generate(request)

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        async with self._run_request() as host:
            return await host.stream(request, on_tokens)

    @contextlib.asynccontextmanager
    async def _run_request(self) -> AsyncIterator[EngineHost]:
        """Provide the started engine for one request, apply its deadline, and count the completion."""
        await self._wait_until_started()
        with self._record_handle_wait("generate", self._request_timeout_seconds):
            async with self._apply_deadline(self._request_timeout_seconds, REQUEST):
                yield self._host.result()
        self._num_answers += 1

    async def teardown(self) -> None:
        """Shut the engine down gracefully within `TEARDOWN_SECONDS`, then stop its event loop."""
        if self._has_ended.is_set():
            return
        await asyncio.to_thread(wait, [self._host], TEARDOWN_SECONDS)
        with contextlib.suppress(WorkerError):
            await self._wait_for_answer(self.start(InferenceEngineInterface.teardown), TEARDOWN_SECONDS, CONTROL)
        await asyncio.to_thread(self._stop_loop)

    def _stop_loop(self) -> None:
        """Stop the event loop: calls in flight and all later ones raise an error."""
        self._has_ended.set()
        self._host.add_done_callback(_stop)


def _stop(host: "Future[EngineHost]") -> None:
    if not host.cancelled() and host.exception() is None:
        host.result().stop()
