"""Driver of the colocation protocol: moves engines and workers onto and off the device they share.

`colocation_protocol.py` describes the protocol.

A failure during a move leaves the state of the device unknown. Every later move is refused until `recover`, which
offloads all workers, waits until crashed engines have restarted, and puts all engines to sleep.

An engine starts awake, so it may start only while no worker is on the device: `start_engine` waits for that, and the
next sync frees the device. It is put to sleep if the other engines sleep. It has the weights of the model's files until
the next sync or `send_between`.

Before a sync of all weights, engines sleep at level 2: weights are dropped without a copy in host memory, and the
engines do not generate until the sync has completed. If weights must be kept (`send_between`, which sends to only one
engine; syncs of adapters or deltas), they sleep at level 1.

Independent of Ray and of engine classes; it only calls coroutines.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from skyrl_gym.waits import waiting
from skyrl_train.config.config import OffloadMode
from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.colocation_protocol import (
    ALL_SHARE,
    EMPTY,
    ENGINES_ONLY,
    NO_SHARING,
    POLICY_AND_REF_SHARE,
    SYNC,
    ColocationError,
    DeviceState,
    Engines,
    Event,
    Worker,
    events_of,
    next_state,
)
from skyrl_train.training_backends.host_store import Transfer
from skyrl_train.utils.explanations import TRAINER, write_explanation
from skyrl_train.workers.worker import Worker as ModelWorker

__all__ = ["Colocation", "ColocationError", "DeviceState", "Engines"]

T = TypeVar("T")

_RETURN_ATTEMPTS = 3
_RELEASES: dict[OffloadMode, Callable[[Any], Transfer | None]] = {
    "keep": ModelWorker.release_cached_memory,
    "optimizer": ModelWorker.offload_optimizer,
    "all": ModelWorker.offload_to_cpu,
}
"""Method by which a worker leaves the device."""
STARTS = "the start of an engine"
"""What a sync waits for, in errors and in records of waits."""


class SleepableEngine(Protocol):
    """Interface of engines (one, or a client for several). A repeated `sleep` has no effect."""

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...


class SyncedEngines(SleepableEngine, Protocol):
    """All engines of a run."""

    @property
    def receives_all_weights(self) -> bool:
        """True if every sync sends all weights, so that engines need not keep theirs before a sync."""
        ...


class OffloadableGroup(Protocol):
    """Interface of a group of workers. Moving it to its current location has no effect."""

    name: str

    async def init_model(self) -> None: ...

    async def call_all(self, method: Callable[[Any], Any]) -> list[Any]: ...


EngineT = TypeVar("EngineT", bound=SleepableEngine)


class Colocation:
    """Scheduler of the device that engines and workers share, following the protocol.

    Args:
        engines: all engines, awake and alone on the device; None without engines.
        engines_share_device: engines and workers share a device (`trainer.placement.colocate_all`).
        policy_and_ref_share: policy and reference model share a device, separate from the engines
            (`colocate_policy_ref`).
        offload: what workers move to host memory when they leave the device.
        start_timeout_seconds: maximum time that a restarting engine and a sync that needs it wait for each other.
    """

    def __init__(
        self,
        engines: SyncedEngines | None,
        *,
        engines_share_device: bool,
        policy_and_ref_share: bool = False,
        offload: OffloadMode = "all",
        start_timeout_seconds: float = 600.0,
    ):
        self._engines = engines
        self._engines_share_device = engines_share_device
        self._transfers: dict[str, list[Transfer]] = {}
        self.offload: OffloadMode = offload
        """What workers move to host memory when they leave the device."""
        self._protocol = NO_SHARING
        if engines_share_device:
            self._protocol = ALL_SHARE
        elif policy_and_ref_share:
            self._protocol = POLICY_AND_REF_SHARE
        self._events = events_of(self._protocol)
        self._state = ENGINES_ONLY if engines_share_device and engines is not None else EMPTY
        self._groups: dict[str, list[OffloadableGroup]] = {}
        self._inconsistent_since: Event | None = None
        self._weights_dropped = False
        self._num_starting = 0
        self._start_timeout = start_timeout_seconds
        # Held for each move (methods with a leading underscore expect it), notified after each.
        self._lock = asyncio.Condition()

    @property
    def state(self) -> DeviceState:
        """State of the shared device after the last successful move."""
        return self._state

    async def start(self, groups: Sequence[OffloadableGroup]) -> None:
        """Load the models of all groups: sequentially and with sleeping engines if they share a device, where the
        policy then stays."""
        for group in groups:
            self._groups.setdefault(group.name, []).append(group)
        sharing = [group for group in groups if f"onload {group.name}" in self._events]
        async with self._lock:
            if self._state == ENGINES_ONLY:
                await self._sleep_before_sync()
            others = [group.init_model() for group in groups if group not in sharing]
            await asyncio.gather(self._load_one_by_one(sharing), *others)

    async def onload(self, worker: Worker) -> None:
        """Move a worker onto the device."""
        async with self._lock:
            await self._onload(worker)

    def check(self, event: Event) -> None:
        """Check an event that moves nothing: `generate`, `send weights`, `use W`.

        Raises:
            ColocationError: the event is not legal in this state.
        """
        if event in self._events:
            self._get_state_after(event)

    def stays_beside_engines(self, worker: str) -> bool:
        """Return True if a worker is on its device while engines generate: a worker with a separate device, and the
        policy if it shares a device only with the reference model."""
        return f"onload {worker}" not in self._events or (worker == "policy" and not self._engines_share_device)

    # ---- sequences of moves

    async def after_generating(self) -> None:
        """Put the engines to sleep and prepare the policy to compute."""
        async with self._lock:
            await self._sleep_before_sync()
            if self._engines_share_device:
                await self._onload("policy")

    @asynccontextmanager
    async def swapped_in(self, worker: Worker) -> AsyncIterator[None]:
        """Replace the policy by `worker` on the device, if they share one, for the duration of the block. After a
        failure inside the block, `worker` stays."""
        # Workers unknown to the protocol are not moved: both have separate devices.
        shared = f"onload {worker}" in self._events and worker != "policy"
        if shared:
            async with self._lock:
                await self._offload("policy")
                await self._onload(worker)
        yield
        if shared:
            async with self._lock:
                await self._offload(worker)
                await self._onload("policy")

    async def sync(self, send: Callable[[], Awaitable[T]]) -> T:
        """Move from an updated policy to engines that generate with its weights. May be repeated after a failure of
        `send`.

        Args:
            send: sends the weights and waits for their arrival. It must not wait for an engine to start.
        Returns: the result of `send`.
        """
        async with self._lock:
            return await self._sync(send, brings_all=True)

    async def send_between(self, send: Callable[[], Awaitable[object]]) -> bool:
        """Send weights to a restarted engine between two syncs. If engines share the device, requests must have been
        paused by `abort` (all caches are lost), and nothing is done unless the engines are awake: otherwise the
        upcoming sync sends the weights.

        Returns: True if the weights were sent.
        """
        async with self._lock:
            # Checked under the lock: no other move may happen between the decision and the move.
            if self._engines_share_device and self._state != ENGINES_ONLY:
                return False
            try:
                await self._sleep(level=1)  # the other engines receive no weights now
                if self._engines_share_device:
                    await self._onload("policy")
                await self._sync(send)
            except BaseException:  # including a cancellation, by which a crash of this engine ends the call
                if self._engines_share_device:
                    await self._resume_generation()
                raise
            return True

    async def start_engine(self, start: Callable[[], Awaitable[EngineT]]) -> EngineT:
        """Restart one engine as soon as no worker is on the device, and bring it to the state of the other engines.

        Args:
            start: returns the engine when it is ready and awake.
        Raises:
            ColocationError: a worker stayed on the device too long.
        """
        if not self._engines_share_device:
            return await start()
        # Counted before acquiring the lock: a sync that holds it sees the engine and frees the device.
        self._num_starting += 1
        try:
            async with self._lock:
                await self._wait(self._is_free_for_engines, "start engine", f"offload {self._state.worker}")
                # Under the lock: until the engine sleeps, no worker may use its memory.
                with waiting("start", who=STARTS):
                    engine = await start()
                # Depends on the state of the other engines, read after the start since it may have changed meanwhile.
                if self._state.engines is not Engines.AWAKE:
                    await engine.sleep()
                if self._state.engines is Engines.WEIGHTS_ONLY:
                    await engine.wake_up(["weights"])
                return engine
        finally:
            self._num_starting -= 1
            async with self._lock:
                self._lock.notify_all()

    async def recover(self, wait_until_healthy: Callable[[], Awaitable[object]] | None = None) -> None:
        """Move from any state, known or unknown, to sleeping engines and no worker on the device. A sync must follow.
        May be repeated.

        Args:
            wait_until_healthy: returns when every crashed engine has been restarted (by `start_engine`).
        """
        async with self._lock:
            # Not None yet: moves are refused until the engines sleep, but `_is_free_for_engines` allows them to start.
            self._inconsistent_since = "recover"
            await self._offload_all()
        # Without the lock, which the awaited engines acquire in `start_engine`.
        if wait_until_healthy is not None:
            await wait_until_healthy()
        async with self._lock:
            if self._engines_share_device and self._engines is not None:
                await self._engines.sleep(self._update_level_before_sync())
            self._inconsistent_since = None
            self._lock.notify_all()

    # ---- under the lock: the way back from a failed move

    async def _offload_all(self) -> None:
        for worker in self._groups:
            if f"onload {worker}" in self._events:
                await self._call(worker, _RELEASES[self.offload])
        self._state = EMPTY
        self._lock.notify_all()

    async def _resume_generation(self) -> None:
        """Move from a failed `send_between` to awake engines, which have pending requests and kept their weights. The
        next attempt skips an engine that crashes meanwhile.

        Raises:
            ColocationError: the weights were not kept: an earlier sleep dropped them, and no sync has replaced them.
        """
        if self._weights_dropped:  # the state of the device remains unknown: only `recover` may follow
            raise ColocationError(
                "cannot return to generation: a sleep before a sync, which drops the engines' weights (level 2), "
                "failed or was not followed by a sync, so some engines have no weights; first: recover, then sync "
                "all weights"
            )
        for attempt in reversed(range(_RETURN_ATTEMPTS)):
            try:
                await self._offload_all()
                await self._get_engines().sleep()
                self._inconsistent_since = None
                await self._wake_weights()
                await self._wake_cache()
                return
            except WorkerError:
                if not attempt:
                    raise

    # ---- single moves, under the lock

    async def _load_one_by_one(self, groups: Sequence[OffloadableGroup]) -> None:
        # The policy last, since it stays on the device.
        for name in sorted(dict.fromkeys(group.name for group in groups), key=lambda name: name == "policy"):
            await self._move(f"onload {name}", lambda name=name: self._init_models(name))
            if name != "policy":
                await self._offload(name)

    async def _init_models(self, worker: str) -> None:
        for group in self._groups[worker]:
            await group.init_model()

    async def _call(self, worker: str, method: Callable[[Any], Transfer | None]) -> None:
        """Call a method of all groups with this name (the reference model and teachers), which move together."""
        for group in self._groups[worker]:
            moves = [move for move in await group.call_all(method) if move is not None]
            if moves:  # ranks move at the same time
                name = "onload" if method is ModelWorker.backload_to_gpu else "offload"
                self._transfers.setdefault(name, []).append(max(moves, key=lambda move: move.seconds))

    async def _onload(self, worker: str) -> None:
        async def load() -> None:
            if self.offload != "keep":
                await self._call(worker, ModelWorker.backload_to_gpu)

        await self._move(f"onload {worker}", load)

    async def _offload(self, worker: str) -> None:
        await self._move(f"offload {worker}", lambda: self._call(worker, _RELEASES[self.offload]))

    def take_metrics(self) -> dict[str, float]:
        """Return seconds, gigabytes and rate of the moves since the last call, of the slowest ranks; empty if nothing
        moved."""
        transfers, self._transfers = self._transfers, {}
        metrics = {}
        for name, moves in transfers.items():
            num_bytes, seconds = (sum(each) for each in zip(*moves, strict=True))
            metrics |= {f"timing/{name}": seconds, f"memory/{name}_gb": num_bytes / 1e9}
            metrics[f"memory/{name}_gb_per_second"] = num_bytes / 1e9 / max(seconds, 1e-9)
        return metrics

    async def _sleep(self, level: int) -> None:
        """Put the engines to sleep, which releases their memory. They must have no running requests."""
        await self._move("sleep", lambda: self._get_engines().sleep(level))

    async def _sleep_before_sync(self) -> None:
        if "sleep" in self._events:
            self._get_state_after("sleep")  # a refusal drops nothing
            await self._sleep(self._update_level_before_sync())

    def _update_level_before_sync(self) -> int:
        """Return the sleep level before a sync, and record whether weights are dropped until the sync."""
        # Recorded before the move: if it fails, some engines may have dropped their weights.
        self._weights_dropped = self._weights_dropped or self._get_engines().receives_all_weights
        return 2 if self._weights_dropped else 1

    async def _wake_weights(self) -> None:
        """Reserve the engines' memory for weights. Engines that wait to start use the device first."""
        if "wake weights" in self._events:
            self._get_state_after("wake weights")
            await self._wait_for_engine_starts()
        await self._move("wake weights", lambda: self._get_engines().wake_up(["weights"]))

    async def _wake_cache(self) -> None:
        """Reserve the engines' memory for the KV cache, after which they may generate.

        Raises:
            ColocationError: the engines dropped their weights when they slept.
        """
        if self._weights_dropped and "wake cache" in self._events:
            raise ColocationError(
                f"cannot wake cache with {self._state}: no weights were sent since the sleep; first: send weights"
            )
        await self._move("wake cache", lambda: self._get_engines().wake_up(["kv_cache"]))

    async def _sync(self, send: Callable[[], Awaitable[T]], *, brings_all: bool = False) -> T:
        # Weights and policy are already on the device; a move would be illegal.
        if self._state == SYNC:  # an earlier `send` failed
            await self._wait_for_engine_starts()
        else:
            await self._wake_weights()
        self.check("send weights")
        result = await send()
        self._weights_dropped = self._weights_dropped and not brings_all
        if self._engines_share_device:
            await self._offload("policy")
        await self._wake_cache()
        return result

    async def _wait_for_engine_starts(self) -> None:
        """Offload the worker while engines wait to start."""
        if not self._num_starting:
            return
        worker = self._state.worker
        if worker is not None:
            await self._offload(worker)
        await self._wait(lambda: not self._num_starting, "wake weights", STARTS)
        if worker is not None:
            await self._onload(worker)

    async def _wait(self, condition: Callable[[], bool], event: Event, missing: str) -> None:
        """Release the lock to other moves until `condition` holds."""
        # A start waits for the trainer to leave the device, the trainer waits for starts.
        who, on = ("", STARTS) if missing == STARTS else (STARTS, TRAINER)
        try:
            # Condition.wait_for releases the lock while waiting, and holds it again when it returns or is cancelled.
            with waiting(f"to {event}, first: {missing}", on=on, who=who, deadline=self._start_timeout):
                await asyncio.wait_for(self._lock.wait_for(condition), self._start_timeout)
        except TimeoutError:
            late = f"cannot {event} for {self._start_timeout:g} s, with {self._state}; first: {missing}"
            raise ColocationError(late + await asyncio.to_thread(write_explanation, late)) from None

    def _is_free_for_engines(self) -> bool:
        return self._state.worker is None and self._inconsistent_since in (None, "recover")

    def _get_engines(self) -> SyncedEngines:
        if self._engines is None:
            raise ValueError("this run has no inference engines")
        return self._engines

    async def _move(self, event: Event, action: Callable[[], Awaitable[object]]) -> None:
        """Check the protocol, then run `action`. Failure or cancellation leaves the state of the device unknown."""
        if event not in self._events:
            return
        following = self._get_state_after(event)
        # Set before the move, not in an except clause, so that a cancellation or exit also leaves it set.
        self._inconsistent_since = event
        await action()
        self._state, self._inconsistent_since = following, None
        self._lock.notify_all()

    def _get_state_after(self, event: Event) -> DeviceState:
        if self._inconsistent_since is not None:
            raise ColocationError(
                f"cannot {event}: the state of the device is unknown since '{self._inconsistent_since}' failed; "
                "first: recover"
            )
        return next_state(self._state, event, self._protocol)
