"""The weight sender's handles on servers, in the policy's process: from URLs alone, since that is what can travel."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine


class RemoteEngines:
    """All engines (`skyrl_train.weight_sync.sender.EngineHandles`). Can be pickled; connects when first used, from an
    event loop in a thread of its own.

    Args:
        engines: `RemoteInferenceEngine`s.
    """

    def __init__(self, engines: Sequence[InferenceEngineInterface]):
        self._connect: list[Callable[[], RemoteInferenceEngine]] = []
        for engine in engines:
            if not isinstance(engine, RemoteInferenceEngine):
                raise TypeError(f"RemoteEngines is for servers started elsewhere; got a {type(engine).__name__}")
            connect = partial(
                RemoteInferenceEngine,
                engine.url,
                engine.model_name,
                backend=engine.backend,
                api_key=engine.api_key,
                control_timeout_seconds=engine.control_timeout_seconds,
            )
            self._connect.append(connect)
        self._engines: list[RemoteInferenceEngine] = []
        self._loop: LoopThread | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_connect": self._connect, "_engines": [], "_loop": None}

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
            except (SkyRLError, CancelledError) as error:  # those of the other engines must not be lost behind it
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop = None
            self._engines = []

    def _connected(self) -> list[RemoteInferenceEngine]:
        if not self._engines:
            self._engines = [connect() for connect in self._connect]
        return self._engines

    def _start(self, engine: RemoteInferenceEngine, method: str, *args: object) -> "Future[Any]":
        if self._loop is None:
            self._loop = LoopThread("remote-engines")
        return self._loop.submit(_named(engine, getattr(engine, method), args))


async def _named(engine: RemoteInferenceEngine, call: Callable[..., Awaitable[Any]], args: Sequence[object]) -> Any:
    try:
        return await call(*args)
    except SkyRLError:
        raise  # names the server
    except Exception as error:
        raise WorkerError(f"the server at {engine.url} failed: {type(error).__name__}: {error}") from error
