"""The scheduler: moves trajectories through their stages, within the limits of a plan, and loses none."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.environments import CloseEnvironment, EnvironmentPool, MakeEnvironment
from skyrl_agent.dispatcher.life import Life, Trajectory
from skyrl_agent.dispatcher.metrics import StageMeter
from skyrl_agent.dispatcher.plan import PLANS, STAGES, Plan, parallel_agents, plan_of, unknown_type
from skyrl_agent.dispatcher.progress import live_progress
from skyrl_agent.dispatcher.registry import DISPATCHER_REGISTRY, run_registered
from skyrl_agent.dispatcher.slots import Gate, Slots
from skyrl_agent.dispatcher.waits import Overdue, before_deadline, to_the_end
from skyrl_agent.errors import ConfigError, InfraError, StageTimeout
from skyrl_agent.types import Stage

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Trajectory)

METHODS: dict[Stage, str] = {stage: f"{stage}_trajectory" for stage in STAGES}
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0


class Dispatch:
    """One batch of trajectories, dispatched.

    A failure ends its trajectory, never the batch: `trajectory.fail` is told. (A ConfigError ends both.) What fails by
    `InfraError` is tried again; a trajectory that fails so in `generate` begins anew. `close` is called at the end of
    each in any case.

    Each stage runs in an asyncio task of its own: what must be left in the task that entered it (anyio's cancel scopes)
    has to live within one stage. A stage that heeds no cancellation is left to itself, and may still write to its
    trajectory.

    Args:
        section: of the task file.
        val_mode: its `val_config` applies.
        make_environment: (number of the place) -> what plans that lend environments lend to one trajectory at a time,
            as its `environment`; made when first needed, and again after an infrastructure failure. None: the number.
        close_environment: of what `make_environment` made.
        clock: seconds; the event loop's, if none.
        methods: of each stage, by name.

    Raises:
        ConfigError: unknown type, contradictory limits.
    """

    def __init__(
        self,
        section: DispatcherSection,
        *,
        val_mode: bool = False,
        make_environment: MakeEnvironment | None = None,
        close_environment: CloseEnvironment | None = None,
        clock: Callable[[], float] | None = None,
        methods: Mapping[Stage, str] = METHODS,
    ) -> None:
        if section.type not in {**PLANS, **DISPATCHER_REGISTRY}:
            raise unknown_type(section.type, {**PLANS, **DISPATCHER_REGISTRY})
        self.section, self.val_mode = section, val_mode
        self.plan = plan_of(section, val_mode) if section.type in PLANS else Plan()
        self.stages = {stage: Gate(lim.parallel, lim.queue) for stage in STAGES for lim in [self.plan.limits(stage)]}
        self.total = self.done = self.failed = self.alive = self.peak_alive = 0
        self._meters = {stage: StageMeter() for stage in STAGES}
        self._abandoned = 0
        self._whole_lives = Slots(self.plan.alive)
        self._make_environment, self._close_environment = make_environment, close_environment
        self._pool: EnvironmentPool | None = None
        self._clock, self._methods = clock, methods
        self._began = self._ended = 0.0

    async def run(self, trajectories: Sequence[T]) -> AsyncGenerator[T, None]:
        """Yields each trajectory as it ends: its `result` set, itself closed. To be called once.

        Raises ConfigError of a stage: it is the same for all trajectories.

        Leaving early (cancellation, or `aclose` of this generator: use `contextlib.aclosing`) cancels and closes
        what is left; their finish reason is `cancelled`.
        """
        if self.total:
            raise RuntimeError("a Dispatch runs one batch: make another for the next")
        self.total, self._began, self._ended = len(trajectories), self._now(), 0.0
        in_order = list(trajectories)
        if self.section.order == "trajectories":
            in_order.sort(key=lambda trajectory: trajectory.trajectory_id)
        if self.section.type not in PLANS:
            limits = parallel_agents(self.section, self.val_mode)
            dispatcher = DISPATCHER_REGISTRY[self.section.type]
            async for trajectory in run_registered(dispatcher, limits, in_order, self._methods, self._close):
                yield trajectory
            return
        if self.plan.lends_environments:
            self._pool = self._new_pool()
        lives = [Life(trajectory, turn, self._began) for turn, trajectory in enumerate(in_order)]
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        async with live_progress(self.total, self._state, self.section.progress):
            turns = {asyncio.create_task(self._live(life)): life.turn for life in lives}
            try:
                for task in turns:
                    task.add_done_callback(ended.put_nowait)
                for _ in turns:
                    task = await ended.get()
                    task.result()
                    yield in_order[turns[task]]
            finally:
                await to_the_end(self._wind_up(turns))

    def metrics(self) -> dict[str, float]:
        """`dispatcher/...`: of each stage what `StageMeter.numbers` tells, and of the whole run `seconds`, `peak_alive`
        (trajectories begun and not yet closed), `failures`, `abandoned` (what did not heed its cancellation)."""
        span = (self._ended or self._now()) - self._began
        whole = {"seconds": span, "peak_alive": self.peak_alive, "failures": self.failed, "abandoned": self._abandoned}
        of_stages = {
            f"{stage}/{name}": value
            for stage in STAGES
            for name, value in self._meters[stage].numbers(self.plan.slots(stage, self.total), span).items()
        }
        return {f"dispatcher/{name}": float(value) for name, value in (whole | of_stages).items()}

    async def _live(self, life: Life) -> None:
        """One trajectory, from the first queue to its end."""
        try:
            await self._whole_lives.take(life.turn)
            life.admitted = True
            if self._pool:
                life.place = self._pool.take()
            await self._pass_stages(life)
        except asyncio.CancelledError as error:
            life.trajectory.fail(life.stage, error, life.attempts)
            raise
        except ConfigError as error:  # the same for all trajectories
            life.trajectory.fail(life.stage, error, life.attempts)
            raise
        except Exception as error:  # whatever it is, it is this trajectory's alone
            logger.debug("%s failed", life.stage, exc_info=True)
            self._meters[life.stage].failures += 1
            self.failed += 1
            life.trajectory.fail(life.stage, error, life.attempts)
        finally:
            await to_the_end(self._end(life))

    async def _pass_stages(self, life: Life) -> None:
        for attempt in range(1, (self.plan.generate.retries or 0) + 2):
            await self._stage(life, "initialize")
            try:
                await self._stage(life, "generate", attempt)
                break
            except InfraError:
                if attempt > (self.plan.generate.retries or 0):
                    raise
                await self._begin_anew(life)
        if life.trajectory.wants_evaluation:
            await self._stage(life, "evaluate")

    async def _stage(self, life: Life, stage: Stage, attempt: int = 1) -> None:
        """Waits for a slot, works in it, and keeps it: the next stage, or the end, gives it back."""
        gate, meter = self.stages[stage], self._meters[stage]
        await gate.admit(life.turn)
        self._leave(life)
        life.stage, life.attempts = stage, attempt
        await gate.start(life.turn)
        life.gate, life.held = gate, stage
        self._open(life)
        began = self._now()
        meter.queue.append(began - life.asked)
        life.seconds[f"queue_{stage}"] += meter.queue[-1]
        try:
            await self._try(life, stage)
        finally:
            life.asked = self._now()
            meter.service.append(life.asked - began)
            life.seconds[stage] += meter.service[-1]

    async def _try(self, life: Life, stage: Stage) -> None:
        retries = 0 if stage == "generate" else self.plan.limits(stage).retries or 0
        while True:
            try:
                return await self._attempt(life, stage)
            except InfraError:
                if life.attempts > retries:
                    raise
            if stage == "initialize":
                await self._restart(life)
            await self._back_off(life)
            life.attempts += 1

    async def _attempt(self, life: Life, stage: Stage) -> None:
        method = getattr(life.trajectory, self._methods[stage])
        work = self._with_environment(life, method) if stage == "initialize" else method()
        seconds = self.plan.limits(stage).timeout_seconds
        try:
            await before_deadline(work, seconds, self.section.close_timeout_seconds)
        except Overdue as overdue:
            self._meters[stage].timeouts += 1
            self._abandoned += overdue.abandoned
            raise StageTimeout(
                f"{stage} did not end within {seconds:g} s; dispatcher.{stage}.timeout_seconds can allow more"
            ) from None

    async def _with_environment(self, life: Life, initialize: Callable) -> None:
        if self._pool and life.place is not None:
            life.trajectory.environment = await self._pool.environment(life.place)
        await initialize()

    async def _begin_anew(self, life: Life) -> None:
        """Back to the first queue, with nothing in hand."""
        await self._restart(life)
        self._leave(life)
        self._shut(life)
        await self._back_off(life)
        life.asked = self._now()

    async def _restart(self, life: Life) -> None:
        """Makes the trajectory forget the attempt that failed. Its environment may be what was broken."""
        grace = self.section.close_timeout_seconds
        try:
            await before_deadline(life.trajectory.restart(), grace, grace)
        except Overdue as overdue:
            self._abandoned += overdue.abandoned
            raise StageTimeout(f"closing it for another attempt took more than {grace:g} s") from None
        if self._pool and life.place is not None:
            life.trajectory.environment = None
            await self._pool.discard(life.place)

    async def _back_off(self, life: Life) -> None:
        self._meters[life.stage].retries += 1
        await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (life.attempts - 1), MAX_BACKOFF_SECONDS))

    async def _end(self, life: Life) -> None:
        """Closes the trajectory, then gives back what it held: what is limited is what is open."""
        trajectory = life.trajectory
        await self._close(trajectory)
        if self._pool and life.place is not None:
            failure = trajectory.result.failure
            await self._pool.give(life.place, broken=failure is not None and failure.kind == "infrastructure")
        self._leave(life)
        self._shut(life)
        if life.admitted:
            self._whole_lives.give()
        trajectory.result.stage_seconds = dict(life.seconds)
        self.done += 1

    async def _close(self, trajectory: Trajectory) -> None:
        grace = self.section.close_timeout_seconds
        try:
            await before_deadline(trajectory.close(), grace, grace)
        except Overdue as overdue:
            self._abandoned += overdue.abandoned
            logger.warning("closing a trajectory did not end within %g s; its runtime's lease removes it", grace)
        except Exception:  # `close` ought not to raise; that its runtime may be left over is no fault of the others
            logger.warning("closing a trajectory failed; its runtime's lease removes it", exc_info=True)

    async def _wind_up(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pool:
            await self._pool.close()
        self._ended = self._now()

    def _leave(self, life: Life) -> None:
        if life.gate and life.held:
            self._meters[life.held].blocked += self._now() - life.asked
            life.gate.leave()
            life.gate = life.held = None

    def _open(self, life: Life) -> None:
        self.alive += not life.open
        self.peak_alive = max(self.peak_alive, self.alive)
        life.open = True

    def _shut(self, life: Life) -> None:
        self.alive -= life.open
        life.open = False

    def _new_pool(self) -> EnvironmentPool:
        count = min(self.plan.alive or self.total, self.total)
        return EnvironmentPool(
            count, self._make_environment, self._close_environment, self.section.close_timeout_seconds
        )

    def _state(self) -> tuple[int, str]:
        """For the progress bar."""
        busy = " · ".join(f"{stage} {gate.slots.used}" for stage, gate in self.stages.items())
        return self.done, f"{busy} · failed {self.failed}"

    def _now(self) -> float:
        return self._clock() if self._clock else asyncio.get_running_loop().time()
