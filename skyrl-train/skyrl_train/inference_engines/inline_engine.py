"""Rollout engines in this process, started by `trainer.placement.launcher=inline`. Imports no Ray."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from skyrl_train.inference_engines.loop_thread import LoopStopped, outcome_of
from skyrl_train.utils.call_errors import build_failure, timed_out


@dataclass(frozen=True)
class InlineCall:
    """Control call under way, and the engine that it is made to."""

    answer: "Future[object]"
    engine: "InlineEngine"


class InlineEngine(EngineHandle):
    """Handle of an engine in this process, with the deadlines of one in another process.

    Args:
        host: the engine, which may still be loading its model.
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

    def wait_for_all(self, calls: Sequence[InlineCall], timeout_seconds: float) -> list[object]:
        deadline = time.monotonic() + timeout_seconds
        return [call.engine._result(call, deadline - time.monotonic(), timeout_seconds) for call in calls]

    def _result(self, call: InlineCall, remaining: float, timeout_seconds: float) -> object:
        try:
            return call.answer.result(max(0.0, remaining))
        except Exception as error:  # an engine's code may raise anything: the caller gets it with the engine's name
            if not call.answer.done():
                raise timed_out([(self._name, self._log_file)], timeout_seconds, CONTROL) from None
            raise self._failure(error) from error

    async def _answer(self, call: InlineCall, timeout_seconds: float, setting: str) -> object:
        async with self._deadline(timeout_seconds, setting):
            return await outcome_of(call.answer)

    @contextlib.asynccontextmanager
    async def _deadline(self, timeout_seconds: float, setting: str) -> AsyncIterator[None]:
        """Raise errors of the block, and the end of its time, under the name of this engine."""
        deadline = asyncio.timeout(timeout_seconds)
        try:
            async with deadline:
                yield
        except Exception as error:  # as in `_result`
            if deadline.expired():
                raise timed_out([(self._name, self._log_file)], timeout_seconds, setting) from None
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, (LoopStopped, CancelledError)):
            return WorkerError(f"{self._name} has ended")
        return build_failure(error, self._name, self._log_file)

    async def _started(self) -> None:
        if not self._host.done():
            seconds = self._start_timeout_seconds
            with self._awaited("its start", seconds):
                async with self._deadline(seconds, START):
                    await asyncio.shield(asyncio.wrap_future(self._host))

    async def check_health(self) -> None:
        await self._started()
        async with self._deadline(self.control_timeout_seconds, CONTROL):
            await self._host.result().check_health(self.control_timeout_seconds)

    async def generate(self, request: GenerationRequest) -> Completion:
        async with self._request() as host:
            return await host.generate(request)

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        async with self._request() as host:
            return await host.stream(request, on_tokens)

    @contextlib.asynccontextmanager
    async def _request(self) -> AsyncIterator[EngineHost]:
        """Provide the started engine for one request, under its deadline, and count the answer."""
        await self._started()
        with self._awaited("generate", self._request_timeout_seconds):
            async with self._deadline(self._request_timeout_seconds, REQUEST):
                yield self._host.result()
        self._num_answers += 1

    async def teardown(self) -> None:
        """Let the engine end in order, within `TEARDOWN_SECONDS`, and then end its event loop."""
        if self._has_ended.is_set():
            return
        await asyncio.to_thread(wait, [self._host], TEARDOWN_SECONDS)
        with contextlib.suppress(WorkerError):
            await self._answer(self.start(InferenceEngineInterface.teardown), TEARDOWN_SECONDS, CONTROL)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """End the event loop: calls under way raise an error, and so does every later one."""
        self._has_ended.set()
        self._host.add_done_callback(_stop)


def _stop(host: "Future[EngineHost]") -> None:
    if not host.cancelled() and host.exception() is None:
        host.result().stop()
