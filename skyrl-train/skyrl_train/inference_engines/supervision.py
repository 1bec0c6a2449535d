"""Keeps engines alive: notices those that died or hang, starts them again, and tells everyone who waits.

The states of an engine and what changes them are in `health`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from loguru import logger

from skyrl_train.config import GeneratorConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.base import EngineInfo, InferenceEngineInterface
from skyrl_train.inference_engines.health import ROUTED, UP, Health, HealthEvent, after

T = TypeVar("T")

Restart = Callable[[int], Awaitable[InferenceEngineInterface]]
"""Starts engine i again, and returns at once or when it is up."""

SILENT_INTERVALS = 3
"""An engine that for so many `generator.engine_health_interval_seconds` neither says that it is well nor computes
anything counts as dead."""

_TEARDOWN_SECONDS = 30.0


class EngineFailure(WorkerError):
    """The engine died or hangs; it has been noted. Its requests may go on elsewhere."""


@runtime_checkable
class Process(Protocol):
    """An engine whose process can be ended from outside."""

    def kill(self) -> None: ...

    def log(self) -> str: ...


class Supervised:
    """One place of an engine, whichever process fills it now."""

    def __init__(self, index: int):
        self.index = index
        self.health = Health.STARTING
        self.info: EngineInfo | None = None
        self.ended: asyncio.Future[Exception]
        """Done, with the reason, when the engine that is here now has failed."""
        self.examination: asyncio.Task[None] | None = None
        self.seen_well = float("-inf")
        """When the last examination began that found it well."""


class Supervisor:
    """Engines, started again when they fail.

    Args:
        engines: in `engines[i]` is always the present engine i.
        settings: deadlines, and how many restarts there are for all engines together.
        restart: starts engine i anew; None: nothing can be started again.
        changed: called whenever an engine's health changed.
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
        """Makes engine i, just started again, as the others are. It gets requests only afterwards."""
        self.lost: WorkerError | None = None
        """Set when it is over: an engine failed and may not be started again."""
        self.num_deaths = self.num_restarts = 0
        self._places = [Supervised(index) for index in range(len(self.engines))]
        self._settings = settings
        self.restart = restart
        self._on_change = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_for_change: list[asyncio.Future[None]] = []
        self._deaths_settled = 0
        self._warned_of_seeds = False

    def with_health(self, *states: Health) -> list[int]:
        return [place.index for place in self._places if place.health in states]

    def attach(self) -> None:
        """Begins to watch, in the running event loop; to be called before anything else there."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self.lost is not None:
            return
        self._loop = loop
        self._tasks, self._waiting_for_change = set(), []
        for place in self._places:
            place.ended, place.examination = loop.create_future(), None
            if place.health is Health.STARTING:
                self._spawn(self._await_start(place))
            elif place.health not in ROUTED:  # who was starting it again went away with the other loop
                if place.health is not Health.DEAD:
                    was_starting = place.health is Health.RESTARTING
                    place.health = after(place.health, HealthEvent.START_FAILED if was_starting else HealthEvent.DIED)
                self._spawn(self._revive(place))
            if self._settings.engine_health_interval_seconds > 0:
                self._spawn(self._watch(place))

    async def run(self, index: int, call: Callable[[InferenceEngineInterface], Awaitable[T]]) -> T:
        """A call of engine `index`, which ends when the engine does.

        Raises:
            EngineFailure: the engine failed.
            Exception: whatever the call raised, if the engine is well.
        """
        self.raise_if_lost()
        place = self._places[index]
        ended = place.ended
        try:
            return await self._until_ended(ended, call(self.engines[index]))
        except EngineFailure:
            raise
        except WorkerError as error:
            await self._examine_since(place, ended, self._now())
            self.raise_if_lost()
            if ended.done():
                raise _failure_of(ended) from error
            raise

    async def run_all(self, call: Callable[[InferenceEngineInterface], Awaitable[T]]) -> list[T]:
        """The same call of every engine that is up, in their order. All end before the first error is raised."""
        self.attach()
        await self.started()
        answers = await asyncio.gather(*(self.run(i, call) for i in self.with_health(*UP)), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, EngineFailure)), errors[0])
        return answers  # pyright: ignore[reportReturnType]

    async def started(self) -> None:
        """Waits for the first start of every engine. Raises WorkerError if one failed."""
        while self.with_health(Health.STARTING):
            self.raise_if_lost()
            await self._change()
        self.raise_if_lost()

    async def settle(self) -> bool:
        """Examines every engine, and returns when none is starting or waits for weights.

        Returns: whether any failed since the last time.

        Raises:
            WorkerError: an engine failed once too often.
        """
        self.attach()
        await self.started()
        began = self._now()
        up = [place for place in self._places if place.health in UP]
        await asyncio.gather(*(self._examine_since(place, place.ended, began) for place in up))
        while self.with_health(Health.DEAD, Health.RESTARTING, Health.WAITING_FOR_WEIGHTS):
            self.raise_if_lost()
            await self._change()
        self.raise_if_lost()
        any_failed, self._deaths_settled = self.num_deaths > self._deaths_settled, self.num_deaths
        return any_failed

    async def infos(self) -> list[EngineInfo]:
        """What each engine last said of itself."""
        self.attach()
        await self.started()
        infos = [place.info for place in self._places]
        assert None not in infos, "an engine that has started has described itself"
        return infos  # pyright: ignore[reportReturnType]

    def max_model_len(self, index: int) -> int | None:
        """The most tokens of prompt and answer on engine `index`; None: it did not say yet."""
        info = self._places[index].info
        return None if info is None else info.max_model_len

    def has_no_seeds(self, index: int) -> bool:
        """Engine `index` draws as it likes (`EngineInfo.lacks`): said once; requests go there without seeds."""
        info = self._places[index].info
        if info is None or "seed" not in info.lacks:
            return False
        if not self._warned_of_seeds:
            self._warned_of_seeds = True
            logger.warning(f"answers cannot be repeated: {info.backend} takes no seeds here ({info.lacks['seed']})")
        return True

    def raise_if_lost(self) -> None:
        if self.lost is not None:
            raise WorkerError(str(self.lost))

    async def close(self) -> None:
        """Stops watching, and ends every engine. Nothing can be called afterwards."""
        if self.lost is None:
            self._lose(WorkerError("the engines were shut down"))
        tasks = [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.teardown() for engine in self.engines), return_exceptions=True)

    # ---- health

    async def _await_start(self, place: Supervised) -> None:
        timeout = self._settings.engine_start_timeout_seconds
        try:
            place.info = await asyncio.wait_for(self.engines[place.index].describe(), timeout)
        except Exception as error:  # whatever it is, those who wait must hear of it
            place.health = after(place.health, HealthEvent.START_FAILED)
            self._lose(self._start_error(place, error))
        else:
            self._note(place, HealthEvent.STARTED)

    async def _watch(self, place: Supervised) -> None:
        while True:
            await asyncio.sleep(self._settings.engine_health_interval_seconds)
            if place.health in UP:
                await self._examine(place)

    async def _examine_since(self, place: Supervised, ended: "asyncio.Future[Exception]", moment: float) -> None:
        """Returns when the engine has been found well in an examination that began after `moment`, or has failed."""
        while not ended.done() and place.seen_well < moment:
            await self._examine(place)

    async def _examine(self, place: Supervised) -> None:
        """Asks the engine whether it is well; together with whoever else asks now."""
        if place.examination is None or place.examination.done():
            place.examination = self._spawn(self._ask_for_health(place, place.ended))
        await asyncio.shield(place.examination)

    async def _ask_for_health(self, place: Supervised, ended: "asyncio.Future[Exception]") -> None:
        began = self._now()
        interval = self._settings.engine_health_interval_seconds
        period = interval or self._settings.engine_control_timeout_seconds / SILENT_INTERVALS
        engine = self.engines[place.index]
        check = asyncio.ensure_future(engine.check_health())
        num_silent, progress = 0, engine.progress()
        try:
            while num_silent < SILENT_INTERVALS:
                await asyncio.wait({check, ended}, timeout=period, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return
                if check.done():
                    break
                # Busy, if it computed something meanwhile: the silence that counts begins anew.
                before, progress = progress, engine.progress()
                num_silent = num_silent + 1 if progress == before else 0
                if num_silent < SILENT_INTERVALS:
                    self._note(place, HealthEvent.SILENT)
            else:
                text = (
                    f"engine {place.index} neither said that it is well nor computed anything for "
                    f"{SILENT_INTERVALS * period:g} s"
                )
                setting = (
                    "three times generator.engine_health_interval_seconds"
                    if interval
                    else "generator.engine_control_timeout_seconds"
                )
                log = f"\n{engine.log()}" if isinstance(engine, Process) else ""
                self._bury(place, HealthEvent.SILENT_TOO_LONG, WorkerError(f"{text} ({setting}){log}"))
                return
            error = check.exception()
            if error is None:
                place.seen_well = began
                self._note(place, HealthEvent.ANSWERED)
            else:
                self._bury(place, HealthEvent.DIED, error)
        finally:
            check.cancel()

    def _note(self, place: Supervised, event: HealthEvent) -> None:
        before, place.health = place.health, after(place.health, event)
        if place.health is not before:
            if place.health is Health.SUSPECT:
                logger.warning(f"engine {place.index} is silent")
            self._tell()

    def _bury(self, place: Supervised, event: HealthEvent, error: BaseException) -> None:
        """The engine has failed: whoever waits for it hears so, and somebody starts it again."""
        reviving = place.health is Health.WAITING_FOR_WEIGHTS
        place.health = after(place.health, event)
        self.num_deaths += 1
        failure = (
            error if isinstance(error, WorkerError) else WorkerError(f"engine {place.index} failed: {_named(error)}")
        )
        logger.warning(f"engine {place.index} failed: {str(failure).splitlines()[0]}")
        place.ended.set_result(failure)
        self._tell()
        if not reviving:  # whoever gives it weights sees that it ended
            self._spawn(self._revive(place))

    # ---- starting again

    async def _revive(self, place: Supervised) -> None:
        """Ends what is left of the old process and starts new ones, until one serves or the restarts are used up."""
        while self.lost is None:
            await self._end(self.engines[place.index])
            failure = _failure_of(place.ended) if place.ended.done() else None
            if self.restart is None or self.num_restarts >= self._settings.max_engine_restarts:
                place.health = after(place.health, HealthEvent.RESTART_REFUSED)
                self._lose(self._with_reason(failure))
                return
            self.num_restarts += 1
            self._note(place, HealthEvent.RESTART_GRANTED)
            logger.warning(f"engine {place.index}: restart {self.num_restarts} of {self._settings.max_engine_restarts}")
            try:
                await self._start_again(place)
                return
            except Exception as error:  # whatever it is, those who wait must hear of it
                if place.health is Health.RESTARTING:
                    place.health = after(place.health, HealthEvent.START_FAILED)
                elif place.health is Health.WAITING_FOR_WEIGHTS:
                    place.health = after(place.health, HealthEvent.DIED)
                if not place.ended.done():
                    place.ended.set_result(self._start_error(place, error))
                logger.warning(f"engine {place.index} could not be started again: {_named(error)}")
                self._tell()

    async def _start_again(self, place: Supervised) -> None:
        assert self.restart is not None
        timeout = self._settings.engine_start_timeout_seconds
        place.ended = asyncio.get_running_loop().create_future()
        # Twice: the device may have to become free first, which has the same deadline.
        engine = await asyncio.wait_for(self.restart(place.index), 2 * timeout)
        self.engines[place.index] = engine
        place.info = await asyncio.wait_for(engine.describe(), timeout)
        self._note(place, HealthEvent.STARTED)  # from now on it must answer in time
        if self.prepare is not None:
            await self._until_ended(place.ended, asyncio.wait_for(self.prepare(place.index), timeout))
        self._note(place, HealthEvent.WEIGHTS_GIVEN)

    async def _end(self, engine: InferenceEngineInterface) -> None:
        """Ends an engine's process and all that it started, before another takes its place."""
        try:
            ending = asyncio.to_thread(engine.kill) if isinstance(engine, Process) else engine.teardown()
            await asyncio.wait_for(ending, _TEARDOWN_SECONDS)
        except Exception as error:  # it is dead, or nothing can be done about it
            logger.warning(f"the end of a failed engine: {_named(error)}")

    def _with_reason(self, failure: EngineFailure | None) -> WorkerError:
        """Why it is over: what happened, why nothing is started again, and the engine's log."""
        first, *others = str(failure or "an engine failed").splitlines()
        limit = self._settings.max_engine_restarts
        if self.restart is None:
            why = "nothing in this run can start it again"
        else:
            why = f"it is not started again: generator.max_engine_restarts={limit} are used up"
        return WorkerError("\n".join([first, why, *others]))

    def _start_error(self, place: Supervised, error: Exception) -> WorkerError:
        if isinstance(error, TimeoutError):
            timeout = self._settings.engine_start_timeout_seconds
            engine = self.engines[place.index]
            log = f"\n{engine.log()}" if isinstance(engine, Process) else ""
            setting = f"generator.engine_start_timeout_seconds={timeout:g}"
            return WorkerError(f"engine {place.index} did not start within {setting}{log}")
        if isinstance(error, WorkerError):
            return error
        return WorkerError(f"engine {place.index} could not start: {_named(error)}")

    def _lose(self, error: WorkerError) -> None:
        """It is over for all engines; everyone hears why."""
        self.lost = error
        for place in self._places:
            if self._loop is not None and not place.ended.done():
                place.ended.set_result(error)
        self._tell()

    # ---- waiting

    async def _until_ended(self, ended: "asyncio.Future[Exception]", call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.raise_if_lost()
            raise _failure_of(ended)
        finally:
            task.cancel()

    async def _change(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting_for_change.append(waiting)
        await waiting

    def _tell(self) -> None:
        self._on_change()
        waiting, self._waiting_for_change = self._waiting_for_change, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _failure_of(ended: "asyncio.Future[Exception]") -> EngineFailure:
    return EngineFailure(str(ended.result()))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
