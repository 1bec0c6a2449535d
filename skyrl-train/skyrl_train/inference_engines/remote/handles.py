"""Handles of servers for the weight sender in the policy's process, built from picklable URLs."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from skyrl_train.errors import SkyRLError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.weight_sync.base import EngineHandles


class RemoteEngines(EngineHandles):
    """All remote engines. Picklable; connects on first use, from an event loop in a dedicated thread.

    Args:
        engines: `RemoteInferenceEngine`s.
    """

    def __init__(self, engines: Sequence[InferenceEngineInterface]):
        self._connect: list[Callable[[], RemoteInferenceEngine]] = []
        for engine in engines:
            if not isinstance(engine, RemoteInferenceEngine):
                raise TypeError(f"RemoteEngines needs external servers; got a {type(engine).__name__}")
            connect = partial(
                RemoteInferenceEngine,
                engine.url,
                engine.model_name,
                backend=engine.backend,
                api_key=engine.api_key,
                control_timeout_seconds=engine.control_timeout_seconds,
            )
            self._connect.append(connect)
        self.num_engines = len(self._connect)
        self._engines: list[RemoteInferenceEngine] = []
        self._loop: LoopThread | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_engines": [], "_loop": None}

    def start(self, index: int, method: Callable[..., object], *args: object) -> "Future[Any]":
        if self._loop is None:
            self._engines = [connect() for connect in self._connect]
            self._loop = LoopThread("remote-engines")
        engine = self._engines[index]
        return self._loop.submit(_name_handles(engine, getattr(engine, method.__name__), args))

    def wait(self, calls: list["Future[Any]"]) -> list[Any]:
        """Wait for calls, each with the deadline of its engine. The first failure is raised after all have ended."""
        failures: list[Exception] = []
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call.result())
            except (SkyRLError, CancelledError) as error:  # errors of other engines must not be lost
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop = None


async def _name_handles(
    engine: RemoteInferenceEngine, call: Callable[..., Awaitable[Any]], args: Sequence[object]
) -> Any:
    try:
        return await call(*args)
    except SkyRLError:
        raise  # names the server
    except Exception as error:
        raise WorkerError(f"the server at {engine.url} failed: {type(error).__name__}: {error}") from error
