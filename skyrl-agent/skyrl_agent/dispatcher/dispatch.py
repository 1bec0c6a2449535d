"""Scheduler of trajectories: moves them through their stages, within the limits of a plan."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.capacity import Capacity
from skyrl_agent.dispatcher.environments import CloseEnvironment, EnvironmentPool, MakeEnvironment
from skyrl_agent.dispatcher.limits import Priority
from skyrl_agent.dispatcher.metrics import StageMeter
from skyrl_agent.dispatcher.plan import PLANS, STAGES, build_unknown_type_error, get_parallel_agents
from skyrl_agent.dispatcher.progress import show_progress
from skyrl_agent.dispatcher.registry import DISPATCHER_REGISTRY, run_registered
from skyrl_agent.dispatcher.trajectory_state import Trajectory, TrajectoryState
from skyrl_agent.dispatcher.waits import DeadlineExceeded, wait_before_deadline, wait_despite_cancellation
from skyrl_agent.errors import ConfigError, InfraError, StageTimeout
from skyrl_agent.types import Stage
from skyrl_gym.waits import explanation, waiting

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Trajectory)

METHODS: dict[Stage, str] = {stage: f"{stage}_trajectory" for stage in STAGES}
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0
HEDGE_CHECKS = 64
"""Times that a batch is asked for whether its last trajectories should begin together."""


def get_slots_name(stage: Stage) -> str:
    """Return the name of a stage's slots, in records of waits."""
    return f"slots of {stage}"


class Dispatch:
    """Scheduler of one batch of trajectories.

    A failure ends its trajectory, never the batch: `trajectory.fail` records it. (A ConfigError ends both.) A stage
    that fails by `InfraError` is retried; `generate` restarts with `initialize`. `close` is always called at the end of
    a trajectory.

    Each stage runs in a separate asyncio task. anyio cancel scopes must be exited by the task that entered them, so
    they have to end within the stage. A stage that ignores its cancellation is abandoned, and may still write to its
    trajectory.

    Args:
        section: the task file's `dispatcher` section.
        val_mode: apply the section's `val_config`.
        make_environment: (index) -> `environment` of one trajectory at a time, in plans that reuse environments; called
            at first use, and again after an infrastructure failure. None: the environment is the index.
        close_environment: closes a result of `make_environment`.
        clock: seconds; None: the event loop's clock.
        methods: name of the method of each stage.
        capacity: slots shared by concurrent batches; None: slots for this batch only.

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
        capacity: Capacity | None = None,
    ) -> None:
        if section.type not in {**PLANS, **DISPATCHER_REGISTRY}:
            raise build_unknown_type_error(section.type, {**PLANS, **DISPATCHER_REGISTRY})
        self.section, self.val_mode = section, val_mode
        self.capacity = capacity or Capacity(section, val_mode)
        self.plan, self.stages = self.capacity.plan, self.capacity.stages
        self.total = self.done = self.failed = self.alive = self.peak_alive = 0
        self._meters = {stage: StageMeter() for stage in STAGES}
        self._abandoned = 0
        self._make_environment, self._close_environment = make_environment, close_environment
        self._batch: Sequence[TrajectoryState] = ()
        self._pool: EnvironmentPool | None = None
        self._clock, self._methods = clock, methods
        self._began = self._ended = 0.0

    async def run(self, trajectories: Sequence[T]) -> AsyncGenerator[T, None]:
        """Yield each trajectory as it ends, closed and with its `result`. May be called once.

        A stage's ConfigError is raised, as it affects all trajectories.

        Leaving early (cancellation, or `aclose` of this generator: use `contextlib.aclosing`) cancels and closes the
        remaining trajectories; their finish reason is `cancelled`.
        """
        if self.total:
            raise RuntimeError("a Dispatch runs one batch: create a new one for the next batch")
        self.total, self._began, self._ended = len(trajectories), self._now(), 0.0
        in_order = list(trajectories)
        if self.section.order != "instances":
            in_order.sort(key=lambda trajectory: trajectory.trajectory_id)
        if self.section.type not in PLANS:
            limits = get_parallel_agents(self.section, self.val_mode)
            dispatcher = DISPATCHER_REGISTRY[self.section.type]
            async for trajectory in run_registered(dispatcher, limits, in_order, self._methods, self._close):
                yield trajectory
            return
        if self.plan.reuses_environments:
            self._pool = self._create_pool()
        states = self._batch = self._create_states(in_order)
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        async with show_progress(self.total, self._describe_progress, self.section.progress):
            tasks = {asyncio.create_task(self._run_one(state)): state.position for state in states}
            try:
                for task in tasks:
                    task.add_done_callback(ended.put_nowait)
                for _ in tasks:
                    task = await ended.get()
                    task.result()
                    yield in_order[tasks[task]]
            finally:
                await wait_despite_cancellation(self._stop_all(tasks))

    def metrics(self) -> dict[str, float]:
        """Return `dispatcher/...` metrics: `StageMeter.numbers` of each stage, and for the whole run `seconds`,
        `peak_alive` (maximum number of open trajectories), `failures`, `abandoned` (stages that ignored their
        cancellation).
        """
        span = (self._ended or self._now()) - self._began
        whole = {"seconds": span, "peak_alive": self.peak_alive, "failures": self.failed, "abandoned": self._abandoned}
        of_stages = {
            f"{stage}/{name}": value
            for stage in STAGES
            for name, value in self._meters[stage].numbers(self.capacity.slots(stage, self.total), span).items()
        }
        return {f"dispatcher/{name}": float(value) for name, value in (whole | of_stages).items()}

    def _create_states(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryState]:
        batch = self.capacity.start_batch()
        return [
            TrajectoryState(
                trajectory,
                batch,
                position,
                self.capacity.instance(batch, trajectory.result.instance_id),
                waiting_since=self._began,
            )
            for position, trajectory in enumerate(trajectories)
        ]

    def _compute_priority(self, state: TrajectoryState, stage: Stage) -> Priority:
        """Compute a sort key: earlier batches, then the most predicted work left, then the order of the run."""
        return lambda: (state.batch, -self.capacity.estimate_remaining(state.instance, stage), state.position)

    async def _run_one(self, state: TrajectoryState) -> None:
        """Run one trajectory from the first queue to its end."""
        try:
            await self.capacity.alive.acquire(self._compute_priority(state, "initialize"))
            state.admitted = True
            if self._pool:
                state.environment_index = self._pool.acquire()
            await self._run_stages(state)
        except asyncio.CancelledError as error:
            state.trajectory.fail(state.stage, error, state.attempts)
            raise
        except ConfigError as error:  # affects all trajectories
            state.trajectory.fail(state.stage, error, state.attempts)
            raise
        except Exception as error:  # user code may raise anything; it ends this trajectory alone
            logger.debug("%s failed", state.stage, exc_info=True)
            self._meters[state.stage].failures += 1
            self.failed += 1
            state.trajectory.fail(state.stage, error, state.attempts)
        finally:
            await wait_despite_cancellation(self._close_trajectory(state))

    async def _run_stages(self, state: TrajectoryState) -> None:
        for attempt in range(1, (self.plan.generate.retries or 0) + 2):
            await self._run_stage(state, "initialize")
            try:
                await self._run_stage(state, "generate", attempt)
                break
            except InfraError:
                if attempt > (self.plan.generate.retries or 0):
                    raise
                await self._move_to_queue(state)
        if state.trajectory.wants_evaluation:
            await self._run_stage(state, "evaluate")

    async def _run_stage(self, state: TrajectoryState, stage: Stage, attempt: int = 1) -> None:
        """Wait for a slot and run the stage in it. The slot is kept until the next stage, or the end, releases it."""
        limit, meter, priority = self.stages[stage], self._meters[stage], self._compute_priority(state, stage)
        # All trajectories of a batch may wait before the first stage, too many to record.
        queued = nullcontext() if stage == "initialize" else waiting(f"a slot of {stage}", on=get_slots_name(stage))
        with queued:
            await limit.wait_for_queue(priority)
            self._release_slot(state)
            state.stage, state.attempts = stage, attempt
            await limit.wait_for_stage(priority)
        state.limit, state.held_stage = limit, stage
        self._register_open(state)
        began = self._now()
        meter.queue.append(began - state.waiting_since)
        state.seconds[f"queue_{stage}"] += meter.queue[-1]
        entry = self.capacity.started(stage, began, waited=meter.queue[-1] > 0)
        is_whole = False
        try:
            await self._run_with_retries(state, stage)
            is_whole = True
        finally:
            state.waiting_since = self._now()
            meter.service.append(state.waiting_since - began)
            state.seconds[stage] += meter.service[-1]
            alone = self.capacity.ended(stage, state.waiting_since, entry, state.instance if is_whole else None)
            state.seconds_alone[stage] += meter.service[-1] if alone is None else alone

    async def _run_with_retries(self, state: TrajectoryState, stage: Stage) -> None:
        retries = 0 if stage == "generate" else self.plan.limits(stage).retries or 0
        while True:
            try:
                return await self._run_attempt(state, stage)
            except InfraError:
                if state.attempts > retries:
                    raise
            if stage == "initialize":
                await self._reset_attempt(state)
            await self._wait_for_retry(state)
            state.attempts += 1

    async def _run_attempt(self, state: TrajectoryState, stage: Stage) -> None:
        method = getattr(state.trajectory, self._methods[stage])
        work = self._run_with_environment(state, method) if stage == "initialize" else method()
        seconds = self.plan.limits(stage).timeout_seconds
        result = state.trajectory.result
        name = f"trajectory {result.instance_id}_{state.trajectory.trajectory_id}"
        try:
            with waiting(name, who=get_slots_name(stage)), waiting(stage, who=name, deadline=seconds or 0.0):
                await wait_before_deadline(work, seconds, self.section.close_timeout_seconds)
        except DeadlineExceeded as error:
            self._meters[stage].timeouts += 1
            self._abandoned += error.abandoned
            late = f"{stage} did not finish within {seconds:g} s"
            why = await explanation(f"{name}: {late}")
            raise StageTimeout(f"{late}; raise dispatcher.{stage}.timeout_seconds to allow more{why}") from None

    async def _run_with_environment(self, state: TrajectoryState, initialize: Callable) -> None:
        if self._pool and state.environment_index is not None:
            state.trajectory.environment = await self._pool.environment(state.environment_index)
        await initialize()

    async def _move_to_queue(self, state: TrajectoryState) -> None:
        """Return a trajectory to the first queue without slots."""
        await self._reset_attempt(state)
        self._release_slot(state)
        self._register_closed(state)
        await self._wait_for_retry(state)
        state.waiting_since = self._now()

    async def _reset_attempt(self, state: TrajectoryState) -> None:
        """Discard the failed attempt, and the environment, which may have caused the failure."""
        grace = self.section.close_timeout_seconds
        try:
            await wait_before_deadline(state.trajectory.restart(), grace, grace)
        except DeadlineExceeded as error:
            self._abandoned += error.abandoned
            raise StageTimeout(f"closing it for another attempt took more than {grace:g} s") from None
        if self._pool and state.environment_index is not None:
            state.trajectory.environment = None
            await self._pool.discard(state.environment_index)

    async def _wait_for_retry(self, state: TrajectoryState) -> None:
        self._meters[state.stage].retries += 1
        await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (state.attempts - 1), MAX_BACKOFF_SECONDS))

    async def _close_trajectory(self, state: TrajectoryState) -> None:
        """Close the trajectory, then release its slots: limits count open trajectories."""
        trajectory = state.trajectory
        await self._close(trajectory)
        if self._pool and state.environment_index is not None:
            failure = trajectory.result.failure
            await self._pool.release(
                state.environment_index, broken=failure is not None and failure.kind == "infrastructure"
            )
        self._release_slot(state)
        self._register_closed(state)
        if state.admitted:
            self.capacity.alive.release()
        trajectory.result.stage_seconds = dict(state.seconds)
        if trajectory.result.failure is None:
            self.capacity.record_durations(state.instance, [state.seconds_alone[stage] for stage in STAGES])
        self.done += 1
        state.is_done = True
        if self.capacity.may_hedge and self.done % max(1, self.total // HEDGE_CHECKS) == 0:
            in_stage = {
                stage: [it.instance for it in self._batch if it.stage == stage and not it.is_done] for stage in STAGES
            }
            self.capacity.update_hedge(waiting=in_stage["initialize"], working=in_stage["generate"])

    async def _close(self, trajectory: Trajectory) -> None:
        grace = self.section.close_timeout_seconds
        try:
            await wait_before_deadline(trajectory.close(), grace, grace)
        except DeadlineExceeded as error:
            self._abandoned += error.abandoned
            logger.warning(
                "closing a trajectory did not finish within %g s; its runtime is removed when its lease expires", grace
            )
        except Exception:  # user code may raise anything; a runtime left over does not concern the other trajectories
            logger.warning("closing a trajectory failed; its runtime is removed when its lease expires", exc_info=True)

    async def _stop_all(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pool:
            await self._pool.close()
        self.capacity.end_batch()
        self._ended = self._now()

    def _release_slot(self, state: TrajectoryState) -> None:
        if state.limit and state.held_stage:
            self._meters[state.held_stage].blocked += self._now() - state.waiting_since
            state.limit.release()
            state.limit = state.held_stage = None

    def _register_open(self, state: TrajectoryState) -> None:
        self.alive += not state.is_open
        self.peak_alive = max(self.peak_alive, self.alive)
        state.is_open = True

    def _register_closed(self, state: TrajectoryState) -> None:
        self.alive -= state.is_open
        state.is_open = False

    def _create_pool(self) -> EnvironmentPool:
        count = min(self.plan.alive or self.total, self.total)
        return EnvironmentPool(
            count, self._make_environment, self._close_environment, self.section.close_timeout_seconds
        )

    def _describe_progress(self) -> tuple[int, str]:
        """Return the number of finished trajectories and the text of the progress bar."""
        busy = " · ".join(f"{stage} {limit.running.used}" for stage, limit in self.stages.items())
        return self.done, f"{busy} · failed {self.failed}"

    def _now(self) -> float:
        return self._clock() if self._clock else asyncio.get_running_loop().time()
