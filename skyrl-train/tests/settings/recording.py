"""The inline launcher, with a record of what it starts and what is called."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.engine_handle import EngineHost, MakeEngine
from skyrl_train.inference_engines.inline_engine import InlineCall, InlineEngine
from skyrl_train.orchestration import inline_launcher, ray_launcher
from skyrl_train.orchestration.inline_launcher import InlineLauncher, InlineRank, model_thread
from skyrl_train.orchestration.launcher import Calls, MakeWorker


class Record:
    """Record of the starts and calls of a run."""

    def __init__(self) -> None:
        self.launchers: set[str] = set()
        """Those that the run asked for."""
        self.groups: dict[str, tuple[int, str]] = {}
        """Ranks and device of each group of workers."""
        self.workers: dict[str, Any] = {}
        """The worker of each group of one rank."""
        self.num_engines = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Methods of workers and engines, with their arguments."""
        self.most_requests = 0
        """Maximum number of requests that an engine processed at a time."""
        self.num_to_die = 0
        """Requests at which an engine dies."""


class RecordedRank(InlineRank):
    def __init__(self, record: Record, name: str, make_worker: MakeWorker, args: tuple[Any, ...], device: str):
        def make(*args: Any) -> Any:
            record.workers[name] = make_worker(*args)
            return record.workers[name]

        self._record = record
        super().__init__(name, make, args, device)

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        self._record.calls += [call for own in calls for call in own]
        return await super().call(calls, timeout_seconds, timeout_setting)


class ManyRanks:
    """Ranks that are counted, and do not start."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        raise WorkerError(f"{self.num_ranks} ranks do not start here")

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


class RecordedEngine(InlineEngine):
    """An engine that dies at its next request if the record says so."""

    def __init__(self, record: Record, host: "Future[EngineHost]", *more: Any, **settings: Any):
        super().__init__(host, *more, **settings)
        self._record = record
        self._num_requests = 0
        self._is_dead = False

    def start(self, method: Callable[..., object], *args: object) -> InlineCall:
        self._record.calls.append((method.__name__, args))
        return super().start(method, *args)

    async def check_health(self) -> None:
        self._record.calls.append(("check_health", ()))
        if self._is_dead:
            raise WorkerError("the engine has died")
        await super().check_health()

    async def generate(self, request: Any) -> Any:
        if self._record.num_to_die:
            self._record.num_to_die -= 1
            self._is_dead = True
        if self._is_dead:
            raise WorkerError("the engine has died")
        self._num_requests += 1
        self._record.most_requests = max(self._record.most_requests, self._num_requests)
        try:
            return await super().generate(request)
        finally:
            self._num_requests -= 1


class RecordingLauncher(InlineLauncher):
    """Starts groups of one rank and engines inline; of larger groups it only notes the size."""

    def __init__(self, record: Record, cfg: SkyRLConfig):
        super().__init__(cfg)
        record.launchers.add(cfg.trainer.placement.launcher)
        self._record = record

    def start_ranks(
        self,
        name: str,
        make_worker: MakeWorker,
        args: tuple[Any, ...],
        *,
        num_ranks: int,
        device: str,
        log_folder: Path,
    ) -> Any:
        self._record.groups[name] = num_ranks, device
        return RecordedRank(self._record, name, make_worker, args, device) if num_ranks == 1 else ManyRanks(num_ranks)

    def start_engine(self, index: int, make_engine: MakeEngine) -> RecordedEngine:
        self._record.num_engines += 1
        generator = self._cfg.generator
        return RecordedEngine(
            self._record,
            model_thread().submit(lambda: EngineHost(make_engine)),
            f"engine {index}",
            "no log",
            generator.request_timeout_seconds,
            generator.engine_control_timeout_seconds,
            generator.engine_start_timeout_seconds,
        )


@contextmanager
def recording() -> Iterator[Record]:
    """Replace both launchers by recording ones within the block."""
    record = Record()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline_launcher, "InlineLauncher", lambda cfg: RecordingLauncher(record, cfg))
        patch.setattr(ray_launcher, "RayLauncher", lambda cfg, shared: RecordingLauncher(record, cfg))
        yield record
