"""`trainer.placement.launcher=inline`: workers and engines of a run as objects of this process, without Ray.

All models are loaded and trained in one thread of the process: transformers modifies classes while loading, and torch
plans the collectives of a sharded model once per thread. Every worker has a separate random state, as in a separate
process. Each engine generates in its own thread.
"""

import asyncio
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from loguru import logger
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from skyrl_gym.waits import waiting
from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.engine_handle import EngineHost, MakeEngine
from skyrl_train.inference_engines.inline_engine import InlineEngine
from skyrl_train.orchestration.launcher import Calls, MakeWorker
from skyrl_train.utils.call_errors import build_failure, record_rank_wait, timed_out
from skyrl_train.utils.cpu_numerics import prepare_cpu
from skyrl_train.utils.process_log import get_own_log
from skyrl_train.utils.random_state import RandomState
from skyrl_train.utils.tracebacks import log_traceback

T = TypeVar("T")

EXIT_SECONDS = 10.0
"""Wait of a run's end for a worker that still computes."""


class ModelThread:
    """Daemon thread that runs functions sequentially. A worker stopped at a breakpoint does not prevent the process
    from exiting."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="models", daemon=True).start()

    def _run(self) -> None:
        prepare_cpu()  # as in Ray's processes: multi-threaded matrix products change bits
        while True:
            self._queue.get()()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` after previously submitted functions, unless the future is cancelled first."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:  # e.g. a SystemExit in a worker is passed to its caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(work)
        return future


@functools.cache
def model_thread() -> ModelThread:
    """Return the thread of all models of this process."""
    return ModelThread()


class SharedProcessGroup:
    """Default torch.distributed group of this process, shared by all of its workers: created by the first and destroyed
    with the last, unless it already existed."""

    def __init__(self) -> None:
        self._num_users = 0
        self._is_foreign = False
        self._planned_for: weakref.ref[dist.ProcessGroup] | None = None

    def enter(self) -> None:
        """Register a worker. Must be called in the model thread."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None or not self._num_users:
            self._is_foreign = group is not None
        if group is None or self._planned_for is None or self._planned_for() is not group:
            _clear_sharding_prop_cache()  # torch takes the plans of one group for those of an equal one
        self._planned_for = group and weakref.ref(group)
        self._num_users += 1

    def leave(self) -> None:
        """Unregister a worker. Must be called in the model thread."""
        self._num_users -= 1
        if self._is_foreign:
            return
        # torch caches plans of sharded tensors per thread, which reference the group. A child forked with a
        # `preexec_fn` (Ray's servers) destroys the objects of other threads, and would wait forever for threads of the
        # group, which do not exist in the child.
        _clear_sharding_prop_cache()
        if not self._num_users and dist.is_initialized():
            dist.destroy_process_group()


_PROCESS_GROUP = SharedProcessGroup()


class InlineRank:
    """Single rank of a group: a worker in this process. A call that exceeds its deadline ends the run, although the
    model thread may continue it.

    Args:
        name: name of the group, for errors.
        make_worker, args: builder of the worker and its arguments.
        device: `cpu` or `cuda`.
    """

    num_ranks = 1

    def __init__(self, name: str, make_worker: MakeWorker, args: tuple[Any, ...], device: str):
        self._group, self._name = name, f"{name} worker 0"
        self._random = RandomState(device)
        self._has_ended = False
        self._worker: Any = None
        self._start = model_thread().submit(lambda: self._make(make_worker, args))

    def _make(self, make_worker: MakeWorker, args: tuple[object, ...]) -> None:
        _PROCESS_GROUP.enter()
        try:
            with self._random.activate():
                self._worker = make_worker(*args)
        except BaseException:  # a rank that failed to start is not shut down later
            self._has_ended = True
            _PROCESS_GROUP.leave()
            raise

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        [own] = calls
        deadline = asyncio.timeout(timeout_seconds)
        with record_rank_wait(self._group, calls, timeout_seconds):
            try:
                async with deadline:
                    await asyncio.shield(asyncio.wrap_future(self._start))
                    return [await asyncio.wrap_future(model_thread().submit(lambda: self._call_sequence(own)))]
            except Exception as error:  # user code may raise any error: reported as a failure of this rank
                if deadline.expired():
                    raise timed_out([(self._name, get_own_log())], timeout_seconds, timeout_setting) from None
                log_traceback(error)
                raise build_failure(error, self._name, get_own_log()) from error

    def _call_sequence(self, calls: Calls) -> list[Any]:
        with self._random.activate():
            return [self._call(method, args) for method, args in calls]

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        with waiting(method, who=self._name):
            return getattr(self._worker, method)(*args)

    async def shutdown(self) -> None:
        """Release the worker and its model after its current computation, with a short wait."""
        ending = asyncio.wrap_future(self._release_worker())
        try:
            await asyncio.wait_for(asyncio.shield(ending), EXIT_SECONDS)
        except TimeoutError:
            logger.warning(
                f"{self._name} is still computing after {EXIT_SECONDS:g} s and will stop when this process exits"
            )

    def kill(self) -> None:
        """Release the worker after its current computation."""
        self._release_worker()

    def _release_worker(self) -> "Future[None]":
        def end() -> None:
            if self._has_ended:
                return
            self._has_ended = True
            if self._worker is not None:
                self._worker.teardown()
            self._worker = None
            _PROCESS_GROUP.leave()

        return model_thread().submit(end)


class InlineLauncher:
    """Launcher of workers and engines as objects of this process, on CPU or its first GPU."""

    def __init__(self, cfg: SkyRLConfig):
        self._cfg = cfg
        self._device = cfg.trainer.placement.resolve_device()

    def start_ranks(
        self,
        name: str,
        make_worker: MakeWorker,
        args: tuple[object, ...],
        *,
        num_ranks: int,
        device: str,
        log_folder: Path,
    ) -> InlineRank:
        if num_ranks != 1:
            raise ValueError(f"{num_ranks} ranks of {name} do not fit into one process")
        return InlineRank(name, make_worker, args, device)

    def start_engine(self, index: int, make_engine: MakeEngine) -> InlineEngine:
        def make() -> EngineHost:
            with RandomState(self._device).activate():
                return EngineHost(make_engine, f"engine {index}")

        generator = self._cfg.generator
        return InlineEngine(
            model_thread().submit(make),
            f"engine {index}",
            get_own_log(),
            generator.request_timeout_seconds,
            control_timeout_seconds=generator.engine_control_timeout_seconds,
            start_timeout_seconds=generator.engine_start_timeout_seconds,
        )

    async def check_files(self, cfg: SkyRLConfig, data: Sequence[str], log_folder: Path) -> None:
        """Do nothing, since there is one machine."""
