"""Supervision of engines: detects crashed or hanging engines, restarts them, and wakes waiting callers.

The states of an engine and their transitions are in `health`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from loguru import logger

from skyrl_gym.waits import waiting
from skyrl_train.config import GeneratorConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import EngineInfo, Feature, InferenceEngineInterface
from skyrl_train.inference_engines.health import ROUTED, UP, Health, HealthEvent, get_next_state
from skyrl_train.utils.explanations import write_explanation

T = TypeVar("T")

Restart = Callable[[int], Awaitable[InferenceEngineInterface]]
"""Function that restarts engine i, and returns immediately or when it runs."""

SILENT_INTERVALS = 3
"""Number of `generator.engine_health_interval_seconds` after which an engine without health replies or progress counts
as crashed.
"""

_TEARDOWN_SECONDS = 30.0


class EngineFailure(WorkerError):
    """Crash or hang of an engine, already recorded. Its requests can be continued elsewhere."""


@runtime_checkable
class Process(Protocol):
    """Engine with a process that can be killed externally."""

    def kill(self) -> None: ...

    def log(self) -> str: ...


class EngineState:
    """State of engine i across restarts of its process."""

    def __init__(self, index: int):
        self.index = index
        self.health = Health.STARTING
        self.info: EngineInfo | None = None
        self.ended: asyncio.Future[Exception]
        """Future that is set with the error when the current engine fails."""
        self.examination: asyncio.Task[None] | None = None
        self.seen_well = float("-inf")
        """Start time of the last successful health check."""


class Supervisor:
    """Supervisor that restarts failed engines.

    Args:
        engines: `engines[i]` is always the current engine i.
        settings: deadlines, and the number of restarts for all engines together.
        restart: restarts engine i; None: restarts are not possible.
        changed: called after every change of an engine's health.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        settings: GeneratorConfig,
        restart: Restart | None,
        changed: Callable[[], None],
    ):
        self.engines = list(engines)
        self.prepare: Callable[[int], Awaitable[None]] | None = None
        """Function that brings the restarted engine i to the state of the others before it gets requests."""
        self.lost: WorkerError | None = None
        """Error of a failed engine that cannot be restarted; it ends all engines."""
        self.num_deaths = self.num_restarts = 0
        self._states = [EngineState(index) for index in range(len(self.engines))]
        self._settings = settings
        self.restart = restart
        self._on_change = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_for_change: list[asyncio.Future[None]] = []
        self._reported_deaths = 0
        self._warned_of_seeds = False

    def get_engines_with_health(self, *healths: Health) -> list[int]:
        return [state.index for state in self._states if state.health in healths]

    def attach(self) -> None:
        """Start watching the engines in the running event loop; must be called first in that loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self.lost is not None:
            return
        self._loop = loop
        self._tasks, self._waiting_for_change = set(), []
        for state in self._states:
            state.ended, state.examination = loop.create_future(), None
            if state.health is Health.STARTING:
                self._start_task(self._wait_for_start(state))
            elif state.health not in ROUTED:  # the task that restarted it ended with the other loop
                if state.health is not Health.DEAD:
                    was_starting = state.health is Health.RESTARTING
                    state.health = get_next_state(
                        state.health, HealthEvent.START_FAILED if was_starting else HealthEvent.DIED
                    )
                self._start_task(self._restart(state))
            if self._settings.engine_health_interval_seconds > 0:
                self._start_task(self._run_watchdog(state))

    async def run(self, index: int, call: Callable[[InferenceEngineInterface], Awaitable[T]]) -> T:
        """Call engine `index`; the call ends if the engine fails.

        Raises:
            EngineFailure: the engine failed.
            Exception: the error of the call, if the engine is healthy.
        """
        self.raise_if_lost()
        state = self._states[index]
        ended = state.ended
        task = asyncio.ensure_future(call(self.engines[index]))
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            return self._get_result(task, ended)
        except EngineFailure:
            raise
        except WorkerError as error:
            await self._wait_for_check_since(state, ended, self._get_time())
            self.raise_if_lost()
            if ended.done():
                raise _get_failure(ended) from error
            raise
        finally:
            task.cancel()

    def _get_result(self, task: "asyncio.Future[T]", ended: "asyncio.Future[Exception]") -> T:
        """Return the result of a finished call, or raise the failure of its engine."""
        if task.done():
            return task.result()
        self.raise_if_lost()
        raise _get_failure(ended)

    async def run_all(self, call: Callable[[InferenceEngineInterface], Awaitable[T]]) -> list[T]:
        """Call every running engine, in order. All calls end before the first error is raised."""
        self.attach()
        await self.wait_until_started()
        answers = await asyncio.gather(
            *(self.run(i, call) for i in self.get_engines_with_health(*UP)), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, EngineFailure)), errors[0])
        return answers  # pyright: ignore[reportReturnType]

    async def wait_until_started(self) -> None:
        """Wait until every engine has started for the first time. Raises WorkerError if one failed."""
        while self.get_engines_with_health(Health.STARTING):
            self.raise_if_lost()
            await self._set_health()
        self.raise_if_lost()

    async def wait_until_healthy(self) -> bool:
        """Check every engine, and wait until none is starting or waits for weights.

        Returns: True if any failed since the last call.

        Raises:
            WorkerError: an engine failed once too often.
        """
        self.attach()
        await self.wait_until_started()
        began = self._get_time()
        up = [state for state in self._states if state.health in UP]
        await asyncio.gather(*(self._wait_for_check_since(state, state.ended, began) for state in up))
        while self.get_engines_with_health(Health.DEAD, Health.RESTARTING, Health.WAITING_FOR_WEIGHTS):
            self.raise_if_lost()
            await self._set_health()
        self.raise_if_lost()
        any_failed, self._reported_deaths = self.num_deaths > self._reported_deaths, self.num_deaths
        return any_failed

    async def infos(self) -> list[EngineInfo]:
        """Return the last description of each engine."""
        self.attach()
        await self.wait_until_started()
        infos = [state.info for state in self._states]
        assert None not in infos, "a started engine has reported its info"
        return infos  # pyright: ignore[reportReturnType]

    def max_model_len(self, index: int) -> int | None:
        """Return the context length of engine `index`; None if not known yet."""
        info = self._states[index].info
        return None if info is None else info.max_model_len

    def is_unsupported(self, index: int, feature: Feature) -> bool:
        """Return whether engine `index` is known not to support a feature."""
        info = self._states[index].info
        return info is not None and feature in info.unsupported

    def has_no_seeds(self, index: int) -> bool:
        """Return whether engine `index` ignores seeds (`EngineInfo.unsupported`), and log a warning once."""
        info = self._states[index].info
        if info is None or not self.is_unsupported(index, "seed"):
            return False
        if not self._warned_of_seeds:
            self._warned_of_seeds = True
            logger.warning(
                f"completions cannot be reproduced: {info.backend} does not support seeds ({info.unsupported['seed']})"
            )
        return True

    def raise_if_lost(self) -> None:
        if self.lost is not None:
            raise WorkerError(str(self.lost))

    async def close(self) -> None:
        """Stop watching, and shut down every engine. No call is possible afterwards."""
        if self.lost is None:
            self._fail_all(WorkerError("the engines were shut down"))
        tasks = [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.teardown() for engine in self.engines), return_exceptions=True)

    # ---- health

    async def _wait_for_start(self, state: EngineState) -> None:
        timeout = self._settings.engine_start_timeout_seconds
        try:
            with waiting("an engine to start", on=f"engine {state.index}", deadline=timeout):
                state.info = await asyncio.wait_for(self.engines[state.index].describe(), timeout)
        except Exception as error:  # whatever it is, those who wait must hear of it
            if isinstance(error, TimeoutError):
                await asyncio.to_thread(write_explanation, f"engine {state.index} did not start within {timeout:g} s")
            state.health = get_next_state(state.health, HealthEvent.START_FAILED)
            self._fail_all(self._start_error(state, error))
        else:
            self._apply(state, HealthEvent.STARTED)

    async def _run_watchdog(self, state: EngineState) -> None:
        while True:
            await asyncio.sleep(self._settings.engine_health_interval_seconds)
            if state.health in UP:
                await self._check_engine(state)

    async def _wait_for_check_since(
        self, state: EngineState, ended: "asyncio.Future[Exception]", moment: float
    ) -> None:
        """Wait until a health check that began after `moment` succeeds, or the engine fails."""
        while not ended.done() and state.seen_well < moment:
            await self._check_engine(state)

    async def _check_engine(self, state: EngineState) -> None:
        """Check the engine's health; concurrent calls share one check."""
        if state.examination is None or state.examination.done():
            state.examination = self._start_task(self._request_health(state, state.ended))
        await asyncio.shield(state.examination)

    async def _request_health(self, state: EngineState, ended: "asyncio.Future[Exception]") -> None:
        began = self._get_time()
        interval = self._settings.engine_health_interval_seconds
        period = interval or self._settings.engine_control_timeout_seconds / SILENT_INTERVALS
        engine = self.engines[state.index]
        check = asyncio.ensure_future(engine.check_health())
        num_silent, progress = 0, engine.progress()
        try:
            while num_silent < SILENT_INTERVALS:
                await asyncio.wait({check, ended}, timeout=period, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return
                if check.done():
                    break
                # Busy if it made progress: the period of silence restarts.
                before, progress = progress, engine.progress()
                num_silent = num_silent + 1 if progress == before else 0
                if num_silent < SILENT_INTERVALS:
                    self._apply(state, HealthEvent.SILENT)
            else:
                text = (
                    f"engine {state.index} neither reported its health nor made progress for "
                    f"{SILENT_INTERVALS * period:g} s"
                )
                setting = (
                    "three times generator.engine_health_interval_seconds"
                    if interval
                    else "generator.engine_control_timeout_seconds"
                )
                log = f"\n{engine.log()}" if isinstance(engine, Process) else ""
                why = await asyncio.to_thread(write_explanation, f"{text} ({setting})")  # before it is killed
                if ended.done():
                    return
                self._handle_failure(state, HealthEvent.SILENT_TOO_LONG, WorkerError(f"{text} ({setting}){why}{log}"))
                return
            error = check.exception()
            if error is None:
                state.seen_well = began
                self._apply(state, HealthEvent.ANSWERED)
            else:
                self._handle_failure(state, HealthEvent.DIED, error)
        finally:
            check.cancel()

    def _apply(self, state: EngineState, event: HealthEvent) -> None:
        before, state.health = state.health, get_next_state(state.health, event)
        if state.health is not before:
            if state.health is Health.SUSPECT:
                logger.warning(f"engine {state.index} is not responding")
            self._wake_waiters()

    def _handle_failure(self, state: EngineState, event: HealthEvent, error: BaseException) -> None:
        """Record the engine's failure, wake its waiters, and restart it."""
        reviving = state.health is Health.WAITING_FOR_WEIGHTS
        state.health = get_next_state(state.health, event)
        self.num_deaths += 1
        failure = (
            error
            if isinstance(error, WorkerError)
            else WorkerError(f"engine {state.index} failed: {_format_name(error)}")
        )
        logger.warning(f"engine {state.index} failed: {str(failure).splitlines()[0]}")
        state.ended.set_result(failure)
        self._wake_waiters()
        if not reviving:  # the weight sender sees that it failed
            self._start_task(self._restart(state))

    # ---- restarts

    async def _restart(self, state: EngineState) -> None:
        """Kill the old process and start new ones, until one runs or restarts are exhausted."""
        while self.lost is None:
            await self._stop_process(self.engines[state.index])
            failure = _get_failure(state.ended) if state.ended.done() else None
            if self.restart is None or self.num_restarts >= self._settings.max_engine_restarts:
                state.health = get_next_state(state.health, HealthEvent.RESTART_REFUSED)
                self._fail_all(self._build_final_error(failure))
                return
            self.num_restarts += 1
            self._apply(state, HealthEvent.RESTART_GRANTED)
            logger.warning(f"engine {state.index}: restart {self.num_restarts} of {self._settings.max_engine_restarts}")
            try:
                await self._start_again(state)
                return
            except Exception as error:  # whatever it is, those who wait must hear of it
                if state.health is Health.RESTARTING:
                    state.health = get_next_state(state.health, HealthEvent.START_FAILED)
                elif state.health is Health.WAITING_FOR_WEIGHTS:
                    state.health = get_next_state(state.health, HealthEvent.DIED)
                if not state.ended.done():
                    state.ended.set_result(self._start_error(state, error))
                logger.warning(f"engine {state.index} could not be restarted: {_format_name(error)}")
                self._wake_waiters()

    async def _start_again(self, state: EngineState) -> None:
        assert self.restart is not None
        timeout = self._settings.engine_start_timeout_seconds
        state.ended = asyncio.get_running_loop().create_future()
        # Twice: the device may have to be freed first, with the same deadline.
        with waiting("an engine to start again", deadline=2 * timeout):
            engine = await asyncio.wait_for(self.restart(state.index), 2 * timeout)
        self.engines[state.index] = engine
        state.info = await asyncio.wait_for(engine.describe(), timeout)
        self._apply(state, HealthEvent.STARTED)  # from now on health deadlines apply
        if self.prepare is not None:
            preparing = asyncio.ensure_future(asyncio.wait_for(self.prepare(state.index), timeout))
            try:
                await asyncio.wait({preparing, state.ended}, return_when=asyncio.FIRST_COMPLETED)
                self._get_result(preparing, state.ended)
            finally:
                preparing.cancel()
        self._apply(state, HealthEvent.WEIGHTS_GIVEN)

    async def _stop_process(self, engine: InferenceEngineInterface) -> None:
        """Kill an engine's process and its descendants before its replacement starts."""
        try:
            ending = asyncio.to_thread(engine.kill) if isinstance(engine, Process) else engine.teardown()
            await asyncio.wait_for(ending, _TEARDOWN_SECONDS)
        except Exception as error:  # already exited, or cannot be killed
            logger.warning(f"a failed engine could not be shut down: {_format_name(error)}")

    def _build_final_error(self, failure: EngineFailure | None) -> WorkerError:
        """Build the final error: the failure, why the engine is not restarted, and its log."""
        first, *others = str(failure or "an engine failed").splitlines()
        limit = self._settings.max_engine_restarts
        if self.restart is None:
            why = "this run cannot restart it"
        else:
            why = f"it is not restarted: all generator.max_engine_restarts={limit} restarts were used"
        return WorkerError("\n".join([first, why, *others]))

    def _start_error(self, state: EngineState, error: Exception) -> WorkerError:
        if isinstance(error, TimeoutError):
            timeout = self._settings.engine_start_timeout_seconds
            engine = self.engines[state.index]
            log = f"\n{engine.log()}" if isinstance(engine, Process) else ""
            setting = f"generator.engine_start_timeout_seconds={timeout:g}"
            return WorkerError(f"engine {state.index} did not start within {setting}{log}")
        if isinstance(error, WorkerError):
            return error
        return WorkerError(f"engine {state.index} could not start: {_format_name(error)}")

    def _fail_all(self, error: WorkerError) -> None:
        """Fail all current and later calls of all engines with this error."""
        self.lost = error
        for state in self._states:
            if self._loop is not None and not state.ended.done():
                state.ended.set_result(error)
        self._wake_waiters()

    # ---- waiting

    async def _set_health(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting_for_change.append(waiting)
        await waiting

    def _wake_waiters(self) -> None:
        self._on_change()
        waiting, self._waiting_for_change = self._waiting_for_change, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _start_task(self, coroutine: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _get_time(self) -> float:
        return asyncio.get_running_loop().time()


def _get_failure(ended: "asyncio.Future[Exception]") -> EngineFailure:
    return EngineFailure(str(ended.result()))


def _format_name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
