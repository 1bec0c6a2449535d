"""The weight sender's handles on servers, in the policy's process: from URLs alone, since that is what can travel."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine


class RemoteEngines:
    """All engines (`skyrl_train.weight_sync.sender.EngineHandles`). Can be pickled; connects when first used, from an
    event loop in a thread of its own.

    Args:
        engines: `RemoteInferenceEngine`s.
    """

    def __init__(self, engines: Sequence[InferenceEngineInterface]):
        self._servers: list[dict[str, Any]] = []
        for engine in engines:
            if not isinstance(engine, RemoteInferenceEngine):
                raise TypeError(f"RemoteEngines is for servers started elsewhere; got a {type(engine).__name__}")
            self._servers.append(
                {
                    "url": engine.url,
                    "model_name": engine.model_name,
                    "backend": engine.backend,
                    "api_key": engine.api_key,
                    "control_timeout_seconds": engine.control_timeout_seconds,
                }
            )
        self._engines: list[RemoteInferenceEngine] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_servers": self._servers, "_engines": [], "_loop": None}

    def call_all(self, method: str, *args: object) -> list["Future[Any]"]:
        return [self._start(engine, method, *args) for engine in self._connected()]

    def call_each(self, method: str, args: Sequence[object]) -> list["Future[Any]"]:
        return [self._start(engine, method, arg) for engine, arg in zip(self._connected(), args, strict=True)]

    def wait(self, calls: list["Future[Any]"]) -> list[Any]:
        """Every call has the deadline of its engine. The first failure is raised when all have ended or failed."""
        failures: list[Exception] = []
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call.result())
            except Exception as error:  # those of the other engines must not be lost behind it
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._engines = []

    def _connected(self) -> list[RemoteInferenceEngine]:
        if not self._engines:
            self._engines = [RemoteInferenceEngine(**server) for server in self._servers]
        return self._engines

    def _start(self, engine: RemoteInferenceEngine, method: str, *args: object) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(_named(engine, getattr(engine, method), args), self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="remote-engines", daemon=True).start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _named(engine: RemoteInferenceEngine, call: Callable[..., Awaitable[Any]], args: Sequence[object]) -> Any:
    try:
        return await call(*args)
    except SkyRLError:
        raise  # names the server
    except Exception as error:
        raise WorkerError(f"the server at {engine.url} failed: {type(error).__name__}: {error}") from error
