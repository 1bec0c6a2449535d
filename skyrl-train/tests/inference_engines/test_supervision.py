"""An engine's health, as a table and with real engines in this process that stop serving."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from skyrl_train.config import GeneratorConfig
from skyrl_train.errors import WorkerError
from skyrl_train.inference_engines.health import Health, HealthEvent, get_next_state
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.supervision import EngineFailure, Supervisor

LEGAL = """
starting + started -> healthy
starting + start failed -> lost
healthy + answered -> healthy
healthy + silent -> suspect
healthy + died -> dead
suspect + answered -> healthy
suspect + silent -> suspect
healthy + silent too long -> dead
suspect + silent too long -> dead
suspect + died -> dead
dead + restart granted -> restarting
dead + restart refused -> lost
restarting + started -> waiting for weights
restarting + start failed -> dead
waiting for weights + answered -> waiting for weights
waiting for weights + silent -> waiting for weights
waiting for weights + silent too long -> dead
waiting for weights + died -> dead
waiting for weights + weights given -> healthy
"""


@pytest.mark.parametrize("event", HealthEvent)
@pytest.mark.parametrize("health", Health)
def test_health_transitions_of_all_states_and_events(health, event):
    steps = (line.partition(" -> ") for line in LEGAL.strip().splitlines())
    following = {before: result for before, _, result in steps}.get(f"{health} + {event}")
    if following is not None:
        assert get_next_state(health, event) == following
        return
    with pytest.raises(ValueError, match=f"an engine that is {health} cannot have the event '{event}'"):
        get_next_state(health, event)


class Native(NativeInferenceEngine):
    """May be made deaf, as one that hangs; slow to answer, as one in a long step; and busy, as one that computes."""

    seconds_to_answer = 0.0
    busy = False

    async def check_health(self) -> None:
        await asyncio.sleep(self.seconds_to_answer)
        await super().check_health()

    def progress(self) -> int:
        return time.monotonic_ns() if self.busy else super().progress()


Made = Callable[..., Supervisor]


@pytest.fixture
async def supervise(chat_model: str) -> AsyncIterator[Made]:
    """`supervise(**settings)`: two engines, looked after."""
    made: list[Supervisor] = []

    def make(restart: Callable[[int], Awaitable[Any]] | None = None, **settings: Any) -> Supervisor:
        async def anew(_: int) -> Native:
            return Native(chat_model)

        quiet: dict[str, Any] = {"engine_health_interval_seconds": 0.0, "engine_control_timeout_seconds": 5.0}
        engines = [Native(chat_model), Native(chat_model)]
        made.append(Supervisor(engines, GeneratorConfig(**(quiet | settings)), restart or anew, lambda: None))
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.close()


async def version(engine: Any) -> int:
    return await engine.weight_version()


async def test_failing_call_triggers_health_check_and_restart(supervise: Made):
    supervisor = supervise()
    assert not await supervisor.wait_until_healthy(), "all are well: which says nothing of what fails later"
    assert await supervisor.run_all(version) == [0, 0]
    first = supervisor.engines[1]
    await first.teardown()
    with pytest.raises(EngineFailure, match="the native engine is closed"):
        await supervisor.run_all(version)
    assert await supervisor.wait_until_healthy() and not await supervisor.wait_until_healthy()
    assert supervisor.engines[1] is not first
    assert await supervisor.run_all(version) == [0, 0]
    assert (supervisor.num_deaths, supervisor.num_restarts) == (1, 1)


async def test_error_of_healthy_engine_is_raised_to_caller(supervise: Made):
    supervisor = supervise()
    await supervisor.wait_until_healthy()

    async def refused(_: Any) -> None:
        raise WorkerError("no room")

    with pytest.raises(WorkerError, match="no room") as error:
        await supervisor.run(0, refused)
    assert not isinstance(error.value, EngineFailure)
    assert supervisor.num_deaths == 0


async def test_wait_until_healthy_restarts_crashed_idle_engine(supervise: Made):
    supervisor = supervise()
    assert not await supervisor.wait_until_healthy()
    await supervisor.engines[0].teardown()
    assert supervisor.get_engines_with_health(Health.HEALTHY) == [0, 1]
    assert await supervisor.wait_until_healthy()
    assert supervisor.num_restarts == 1


async def test_watchdog_restarts_crashed_engine(supervise: Made):
    supervisor = supervise(engine_health_interval_seconds=0.2)
    await supervisor.wait_until_healthy()
    await supervisor.engines[0].teardown()
    async with asyncio.timeout(10):
        while supervisor.num_restarts == 0 or supervisor.get_engines_with_health(Health.HEALTHY) != [0, 1]:
            await asyncio.sleep(0.05)


async def test_silent_engine_is_suspect_then_dead_after_three_intervals(supervise: Made):
    supervisor = supervise(engine_health_interval_seconds=0.5)
    await supervisor.wait_until_healthy()
    deaf = supervisor.engines[0]
    assert isinstance(deaf, Native)
    deaf.seconds_to_answer = 1000
    waits = asyncio.create_task(supervisor.run(0, lambda _: asyncio.sleep(1000)))  # hangs as the engine does
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineFailure, match=r"engine 0 .* 1\.5 s"):
        await waits
    assert asyncio.get_running_loop().time() - began > 1.4
    await supervisor.wait_until_healthy()
    assert supervisor.engines[0] is not deaf


async def test_computing_engine_is_not_dead_when_unresponsive(supervise: Made):
    supervisor = supervise(engine_health_interval_seconds=0.1)
    await supervisor.wait_until_healthy()
    busy = supervisor.engines[0]
    assert isinstance(busy, Native)
    busy.seconds_to_answer, busy.busy = 1.5, True  # five times as long as the silence of a hung engine may last
    async with asyncio.timeout(20):
        while supervisor.get_engines_with_health(Health.SUSPECT) != [0]:
            await asyncio.sleep(0.02)
        while supervisor.get_engines_with_health(Health.HEALTHY) != [0, 1]:
            await asyncio.sleep(0.02)
    assert supervisor.num_deaths == 0
    busy.busy = False
    async with asyncio.timeout(20):
        while supervisor.num_deaths == 0:
            await asyncio.sleep(0.02)


async def test_late_health_reply_restores_healthy_state(supervise: Made):
    supervisor = supervise(engine_health_interval_seconds=0.5)
    await supervisor.wait_until_healthy()
    busy = supervisor.engines[0]
    assert isinstance(busy, Native)
    busy.seconds_to_answer = 0.9  # between one and two intervals
    seen: set[Health] = set()
    async with asyncio.timeout(20):
        while seen != {Health.HEALTHY, Health.SUSPECT} or supervisor.get_engines_with_health(Health.HEALTHY) != [0, 1]:
            seen |= {health for health in Health if 0 in supervisor.get_engines_with_health(health)}
            await asyncio.sleep(0.02)
    assert supervisor.engines[0] is busy and supervisor.num_deaths == 0


async def test_restarted_engine_is_prepared_before_serving(supervise: Made):
    supervisor = supervise()
    await supervisor.wait_until_healthy()
    prepared: list[tuple[int, list[int]]] = []

    async def prepare(index: int) -> None:
        prepared.append((index, supervisor.get_engines_with_health(Health.WAITING_FOR_WEIGHTS)))
        assert await version(supervisor.engines[index]) == 0

    supervisor.prepare = prepare
    await supervisor.engines[1].teardown()
    assert await supervisor.wait_until_healthy()
    assert prepared == [(1, [1])]


async def test_failed_start_is_retried(supervise: Made, chat_model: str):
    starts: list[int] = []

    async def second_time(index: int) -> Any:
        starts.append(index)
        if len(starts) == 1:
            raise OSError("no such device")
        return Native(chat_model)

    supervisor = supervise(second_time)
    await supervisor.wait_until_healthy()
    await supervisor.engines[1].teardown()
    assert await supervisor.wait_until_healthy()
    assert starts == [1, 1]


async def test_exhausted_restarts_fail_all_callers(supervise: Made):
    supervisor = supervise(max_engine_restarts=1)
    await supervisor.wait_until_healthy()
    await supervisor.engines[0].teardown()
    await supervisor.wait_until_healthy()
    healthy_call = asyncio.create_task(supervisor.run(1, lambda _: asyncio.sleep(1000)))
    await supervisor.engines[0].teardown()
    expected = (
        "the native engine is closed\nit is not restarted: all generator.max_engine_restarts=1 restarts were used"
    )
    with pytest.raises(WorkerError, match=expected):
        await supervisor.wait_until_healthy()
    for late in (
        healthy_call,
        supervisor.run(1, version),
        supervisor.run_all(version),
        supervisor.wait_until_healthy(),
    ):
        with pytest.raises(WorkerError, match=expected):
            await late


async def test_unstartable_engine_is_not_retried(chat_model: str):
    class NeverUp(Native):
        async def describe(self) -> Any:
            raise WorkerError("engine 1 could not start: no such model")

    never = NeverUp(chat_model)
    supervisor = Supervisor([never], GeneratorConfig(), None, lambda: None)
    with pytest.raises(WorkerError, match="no such model"):
        await supervisor.wait_until_healthy()
    assert supervisor.get_engines_with_health(Health.LOST) == [0]
    await supervisor.close()


async def test_start_may_exceed_health_check_timeout(supervise: Made, chat_model: str):
    class Slow(Native):
        async def describe(self) -> Any:
            await asyncio.sleep(1.0)
            self.seconds_to_answer = 0.0
            return await super().describe()

    async def slow(_: int) -> Slow:
        engine = Slow(chat_model)
        engine.seconds_to_answer = 1000
        return engine

    supervisor = supervise(slow, engine_health_interval_seconds=0.2)
    await supervisor.wait_until_healthy()
    await supervisor.engines[0].teardown()
    assert await supervisor.wait_until_healthy()
    assert (supervisor.num_deaths, supervisor.num_restarts) == (1, 1)


async def test_start_has_deadline(supervise: Made):
    supervisor = supervise(engine_start_timeout_seconds=0.3, max_engine_restarts=1)
    await supervisor.wait_until_healthy()

    async def never(_: int) -> None:
        await asyncio.sleep(1000)

    supervisor.prepare = never
    await supervisor.engines[0].teardown()
    with pytest.raises(WorkerError, match=r"generator\.engine_start_timeout_seconds=0\.3"):
        await supervisor.wait_until_healthy()


def test_watchdog_continues_in_new_event_loop(chat_model: str):
    async def anew(_: int) -> Native:
        return Native(chat_model)

    supervisor = Supervisor([Native(chat_model)], GeneratorConfig(), anew, lambda: None)
    assert asyncio.run(supervisor.run_all(version)) == [0]
    asyncio.run(supervisor.engines[0].teardown())
    assert asyncio.run(supervisor.wait_until_healthy())
    assert asyncio.run(supervisor.run_all(version)) == [0]
    asyncio.run(supervisor.close())
