"""Rollout engines in this process: what `trainer.placement.launcher=inline` starts. Knows no Ray."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference_engines.engine_handle import (
    CONTROL,
    REQUEST,
    START,
    TEARDOWN_SECONDS,
    EngineHandle,
    EngineHost,
)
from skyrl_train.inference_engines.loop_thread import LoopStopped, LoopThread
from skyrl_train.utils.call_errors import failure_of, timed_out


@dataclass(frozen=True)
class InlineCall:
    """A control call under way, and the engine that it is made to."""

    answer: "Future[Any]"
    engine: "InlineEngine"


class InlineEngine(EngineHandle):
    """An engine that runs in this process, with the deadlines of one that runs in another.

    Args:
        host: the engine, which may still be loading its model.
        more: as of any `EngineHandle`.
    """

    def __init__(self, host: "Future[EngineHost]", *more: Any, **settings: Any):
        super().__init__(*more, **settings)
        self._host = host
        self._loop = LoopThread(f"{self._name} calls")
        self._has_ended = threading.Event()

    def start(self, method: str, *args: Any) -> InlineCall:
        if self._has_ended.is_set():
            failed: Future[Any] = Future()
            failed.set_exception(LoopStopped())
            return InlineCall(failed, self)
        return InlineCall(self._loop.submit(self._on_host("control", method, *args)), self)

    def wait_for_all(self, calls: Sequence[InlineCall], timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        return [call.engine._result(call, deadline - time.monotonic(), timeout_seconds) for call in calls]

    def _result(self, call: InlineCall, remaining: float, timeout_seconds: float) -> Any:
        try:
            return call.answer.result(max(0.0, remaining))
        except Exception as error:
            if not call.answer.done():
                raise timed_out([(self._name, self._log_file)], timeout_seconds, CONTROL) from None
            raise self._failure(error) from error

    async def _answer(self, call: InlineCall, timeout_seconds: float, setting: str) -> Any:
        return await self._within(asyncio.wrap_future(call.answer), timeout_seconds, setting)

    async def _within(self, answer: Awaitable[Any], timeout_seconds: float, setting: str) -> Any:
        deadline = asyncio.timeout(timeout_seconds)
        try:
            async with deadline:
                return await answer
        except Exception as error:
            if deadline.expired():
                raise timed_out([(self._name, self._log_file)], timeout_seconds, setting) from None
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, (LoopStopped, CancelledError)):
            return WorkerError(f"{self._name} has ended")
        return failure_of(error, self._name, self._log_file)

    async def _on_host(self, method: str, *args: Any) -> Any:
        host = await asyncio.wrap_future(self._host)
        return await getattr(host, method)(*args)

    def _call(self, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._loop.call(self._on_host(method, *args))

    async def _started(self) -> None:
        if not self._host.done():
            await self._within(asyncio.shield(asyncio.wrap_future(self._host)), self._start_timeout_seconds, START)

    async def check_health(self) -> None:
        await self._started()
        patience = self.control_timeout_seconds
        await self._within(self._call("check_health", patience), patience, CONTROL)

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        await self._started()
        output = await self._within(self._call("generate", input_batch), self._request_timeout_seconds, REQUEST)
        self._num_answers += 1
        return output

    async def teardown(self) -> None:
        """Let the engine end in order, for a moment, and then end its event loops."""
        if self._has_ended.is_set():
            return
        with contextlib.suppress(WorkerError):
            await self._answer(self.start("teardown"), TEARDOWN_SECONDS, CONTROL)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """End the event loops: who still waits gets an error, and nobody can ask for more."""
        self._has_ended.set()
        self._host.add_done_callback(_stop)
        self._loop.stop()


def _stop(host: "Future[EngineHost]") -> None:
    if not host.cancelled() and host.exception() is None:
        host.result().stop()
