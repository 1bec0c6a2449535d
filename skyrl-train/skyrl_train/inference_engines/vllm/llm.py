"""vLLM's asynchronous engine in a dedicated event loop: start, calls with deadlines and named errors, shutdown."""

import asyncio
import contextlib
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_gym.waits import waiting
from skyrl_train.errors import ConfigError, WeightSyncError, WorkerError
from skyrl_train.inference_engines.loop_thread import LoopStopped, LoopThread
from skyrl_train.inference_engines.vllm.processes import list_descendants, stop_processes
from skyrl_train.utils.explanations import write_explanation

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
_SHUTDOWN_SECONDS = 2.0
_CLOSED = "the vllm engine is closed"


class LLMProcesses:
    """`AsyncLLM` and its processes. Ready when the constructor returns.

    Args:
        arguments: vLLM's `AsyncEngineArgs`.
        timeout_seconds: deadline of a call, unless it has its own.

    Raises:
        ConfigError: vLLM rejects the arguments.
        WorkerError: vLLM did not start; its log is this process's output.
    """

    llm: "AsyncLLM"
    """vLLM's engine, for coroutines in its loop."""

    def __init__(self, arguments: Any, timeout_seconds: float):
        self._timeout = timeout_seconds
        self._closed = False
        self._loop = LoopThread("vllm-engine")
        before = list_descendants()
        try:
            with waiting("vLLM to start", deadline=timeout_seconds):
                self.llm = self._loop.call_from_thread(_start(arguments))
            self._processes = [p for p in list_descendants() if p not in before]
        except BaseException:
            stop_processes([p for p in list_descendants() if p not in before])
            self._loop.stop()
            raise

    async def run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the engine's loop without a deadline.

        Raises:
            WorkerError: the engine was closed meanwhile.
        """
        try:
            return await self._loop.call(coroutine)
        except LoopStopped:
            raise WorkerError(_CLOSED) from None

    def run_from_thread(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine and block until it is done."""
        return self._loop.call_from_thread(coroutine)

    async def control(self, coroutine: Coroutine[None, None, T], what: str, seconds: float | None = None) -> T:
        """Run a coroutine in the engine's loop with a deadline. Raises WorkerError if vLLM has crashed."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self.raise_if_dead()
        except WorkerError:
            coroutine.close()
            raise
        limit = self._timeout if seconds is None else seconds
        try:
            with waiting(f"vLLM's reply to {what}", deadline=limit):
                return await self.run(asyncio.wait_for(coroutine, limit))
        except TimeoutError as error:
            late = f"the vllm engine did not respond to {what} within {limit:g} seconds"
            raise WorkerError(late + await asyncio.to_thread(write_explanation, late)) from error
        except EngineDeadError as error:
            raise self.build_crash_error(error) from error

    def raise_if_dead(self) -> None:
        if self._closed:
            raise WorkerError(_CLOSED)
        if self.llm.errored:
            raise self.build_crash_error(None)

    def build_crash_error(self, error: BaseException | None) -> WorkerError:
        """Build the error for calls after vLLM's processes have exited."""
        if self._closed:
            return WorkerError(_CLOSED)
        cause = "" if error is None else f" ({type(error).__name__}: {error})"
        return WorkerError(f"vLLM's engine process crashed{cause}; see its log in the output of this process")

    # ---- in the engine's loop

    async def call_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker of every data-parallel replica. (vLLM's own `collective_rpc` also calls them
        all, but returns only the results of the first replica.)
        """
        core: Any = self.llm.engine_core
        replicas = await core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for replica in replicas for answer in replica]

    async def call_workers_for_weights(self, method: str, *args: object) -> list[Any]:
        """Call a method as `call_workers` does, and convert a worker's error to WeightSyncError."""
        try:
            return await self.call_workers(method, *args)
        except Exception as error:  # vLLM forwards the text of any worker error
            if self.llm.errored:
                raise
            said = _WORKER_ERROR.search(str(error))
            words = said.group(1) if said else f"{type(error).__name__}: {error}"
            raise WeightSyncError(f"vLLM's worker failed in {method}: {words}") from error

    async def stop_computing(self) -> None:
        """Wait until no step is running and all generated tokens are delivered."""
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        while not self.llm.engine_core.outputs_queue.empty():  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0.001)
        for _ in range(3):  # let the output handler run, then the requests
            await asyncio.sleep(0)

    # ---- the end

    def close(self) -> None:
        """Stop vLLM's processes. Calls in flight and later ones fail with `WorkerError`."""
        if self._closed:
            return
        self._closed = True
        self._loop.stop()
        with contextlib.suppress(Exception):  # the processes are stopped in any case
            self.llm.shutdown(timeout=_SHUTDOWN_SECONDS)
            resources: Any = self.llm.engine_core.resources  # pyright: ignore[reportAttributeAccessIssue]
            resources.ctx.destroy(linger=0)  # ZeroMQ sockets, which vLLM leaves to the garbage collector
        stop_processes(self._processes)
        del self.llm  # its finalizer must not run during interpreter shutdown


async def _start(arguments: Any) -> "AsyncLLM":
    """Start vLLM in its future event loop. Blocks the loop, in which nothing else runs yet."""
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        config = arguments.create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM rejected these engine settings: {error}") from error
    try:
        from vllm.v1.executor import Executor

        executor = Executor.get_class(config)
        return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)
    except (RuntimeError, TimeoutError, OSError) as error:
        why = write_explanation("vLLM did not start in time") if isinstance(error, TimeoutError) else ""
        raise WorkerError(f"vLLM did not start{why}: {error} See its log in the output of this process") from error
