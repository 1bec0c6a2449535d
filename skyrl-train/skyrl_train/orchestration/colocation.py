"""Makes engines and workers follow the colocation protocol (`colocation_protocol.py` has its picture).

A failure in mid-move leaves the device in doubt. Every later step is then refused until `recover`, which takes all
workers off, waits for engines that died to be started again, and puts all engines to sleep.

An engine comes up awake, so it may start only while no worker is on the device (`start_engine` waits for that, and the
next sync makes room); if the others sleep, it is put to sleep as well. It has the weights of the model's files until
the next sync, or until `send_between` does one at once.

Knows neither Ray nor engines: it is given coroutines to call.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from skyrl_train.orchestration.colocation_protocol import (
    ALL_SHARE,
    ALONE_AWAKE,
    EMPTY,
    NOBODY_SHARES,
    POLICY_AND_REF_SHARE,
    SYNC,
    ColocationError,
    DeviceState,
    Engines,
    Event,
    Worker,
    after,
    events_of,
)

__all__ = ["Colocation", "ColocationError", "DeviceState", "Engines"]

T = TypeVar("T")


class Sleeper(Protocol):
    """Engines (a client over all of them, or one). A second `sleep` does nothing."""

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...


class Traveller(Protocol):
    """A group of workers. To move it to where it is does nothing."""

    name: str

    async def init_model(self) -> None: ...

    async def call_all(self, method: str, *args: Any) -> list[Any]: ...


SleeperT = TypeVar("SleeperT", bound=Sleeper)


class Colocation:
    """Moves engines and workers on and off the device they share, in the order of the protocol.

    Args:
        engines: all engines, awake and alone on the device; None where there are none.
        takes_turns: engines and workers share a device (`trainer.placement.colocate_all`).
        policy_and_ref_share: those two share one although engines have their own (`colocate_policy_ref`).
        start_timeout_seconds: how long an engine that starts again, and whoever waits for it, wait for each other.
    """

    def __init__(
        self,
        engines: Sleeper | None,
        *,
        takes_turns: bool,
        policy_and_ref_share: bool = False,
        start_timeout_seconds: float = 600.0,
    ):
        self._engines = engines
        self._takes_turns = takes_turns
        self._protocol = ALL_SHARE if takes_turns else POLICY_AND_REF_SHARE if policy_and_ref_share else NOBODY_SHARES
        self._events = events_of(self._protocol)
        self._state = ALONE_AWAKE if takes_turns and engines is not None else EMPTY
        self._groups: dict[str, Traveller] = {}
        self._in_doubt: Event | None = None
        self._num_starting = 0
        self._start_timeout = start_timeout_seconds
        self._turn = asyncio.Condition()  # whoever has it may take steps; notified of each

    @property
    def state(self) -> DeviceState:
        """What is on the shared device, as far as is known."""
        return self._state

    # ---- single steps

    async def start(self, groups: Sequence[Traveller]) -> None:
        """Loads the models of all groups: one after the other where they share a device, with the engines asleep. The
        policy keeps it."""
        self._groups = {group.name: group for group in groups}
        sharing = [group for group in groups if f"bring {group.name}" in self._events]
        async with self._turn:
            if self._state == ALONE_AWAKE:
                await self._sleep()
            others = [group.init_model() for group in groups if group not in sharing]
            await asyncio.gather(self._load_in_turn(sharing), *others)

    async def bring(self, worker: Worker) -> None:
        """The worker gets the device."""
        async with self._turn:
            await self._bring(worker)

    async def take_off(self, worker: Worker) -> None:
        """The worker gives the device back."""
        async with self._turn:
            await self._take_off(worker)

    async def sleep(self) -> None:
        """The engines give the device back. They must have nothing to compute."""
        async with self._turn:
            await self._sleep()

    async def wake_weights(self) -> None:
        """The engines take back room for their weights. Engines that wait to be started get the device before."""
        async with self._turn:
            await self._wake_weights()

    async def wake_cache(self) -> None:
        """The engines take back room for keys and values, and may generate."""
        async with self._turn:
            await self._wake_cache()

    def check(self, event: Event) -> None:
        """For what moves nothing: `generate`, `send weights`, `use W`.

        Raises:
            ColocationError: it is out of turn.
        """
        if event in self._events:
            self._following(event)

    # ---- sentences of the protocol

    async def after_generating(self) -> None:
        """From awake engines to a policy that may compute."""
        async with self._turn:
            await self._sleep()
            if self._takes_turns:
                await self._bring("policy")

    @asynccontextmanager
    async def in_place_of_policy(self, worker: Worker) -> AsyncIterator[None]:
        """`worker` has the device that the policy had, if they share one, and then the policy has it again. After a
        failure in between `worker` stays."""
        shared = f"bring {worker}" in self._events and worker != "policy"
        if shared:
            async with self._turn:
                await self._take_off("policy")
                await self._bring(worker)
        yield
        if shared:
            async with self._turn:
                await self._take_off(worker)
                await self._bring("policy")

    async def sync(self, send: Callable[[], Awaitable[T]]) -> T:
        """From a policy that has learnt to engines that generate with its weights. May be called again after a failure
        of `send`.

        Args:
            send: sends them and waits until they have landed. It must not wait for an engine to be started.
        Returns: what `send` returned.
        """
        async with self._turn:
            return await self._sync(send)

    async def send_between(self, send: Callable[[], Awaitable[object]]) -> bool:
        """Gives weights to an engine that was just started, between two syncs. Where engines share the device, requests
        must have been paused by `abort` (all caches go), and nothing is done unless the engines are awake: else the
        next sync is near, and brings the weights.

        Returns: whether they were sent.
        """
        async with self._turn:
            if self._takes_turns:
                if self._state != ALONE_AWAKE:
                    return False
                await self._sleep()
                await self._bring("policy")
            await self._sync(send)
            return True

    async def start_engine(self, start: Callable[[], Awaitable[SleeperT]]) -> SleeperT:
        """Starts one engine again, as soon as no worker is on the device, and brings it to where the others are.

        Args:
            start: returns the engine when it is ready: awake.
        Raises:
            ColocationError: the workers stayed too long.
        """
        if not self._takes_turns:
            return await start()
        self._num_starting += 1
        try:
            async with self._turn:
                await self._wait(self._is_free_for_engines, "start engine", f"take off {self._state.worker}")
                engine = await start()
                if self._state.engines is not Engines.AWAKE:
                    await engine.sleep()
                if self._state.engines is Engines.WEIGHTS_ONLY:
                    await engine.wake_up(["weights"])
                return engine
        finally:
            self._num_starting -= 1
            async with self._turn:
                self._turn.notify_all()

    async def recover(self, settle: Callable[[], Awaitable[object]] | None = None) -> None:
        """From any state, known or in doubt, to engines asleep and no worker on the device. May be repeated.

        Args:
            settle: returns when every engine that died has been started again (by `start_engine`).
        """
        async with self._turn:
            self._in_doubt = "recover"
            for worker, group in self._groups.items():
                if f"bring {worker}" in self._events:
                    await group.call_all("offload_to_cpu")
            self._state = EMPTY
            self._turn.notify_all()
        if settle is not None:
            await settle()
        async with self._turn:
            if self._takes_turns and self._engines is not None:
                await self._engines.sleep()
            self._in_doubt = None
            self._turn.notify_all()

    # ---- the same, for who has the turn

    async def _load_in_turn(self, groups: Sequence[Traveller]) -> None:
        for group in sorted(groups, key=lambda group: group.name == "policy"):
            await self._step(f"bring {group.name}", group.init_model)
            if group.name != "policy":
                await self._take_off(group.name)

    async def _bring(self, worker: str) -> None:
        await self._step(f"bring {worker}", lambda: self._groups[worker].call_all("backload_to_gpu"))

    async def _take_off(self, worker: str) -> None:
        await self._step(f"take off {worker}", lambda: self._groups[worker].call_all("offload_to_cpu"))

    async def _sleep(self) -> None:
        await self._step("sleep", lambda: self._of_engines().sleep())

    async def _wake_weights(self) -> None:
        if "wake weights" in self._events:
            self._following("wake weights")
            await self._let_engines_start()
        await self._step("wake weights", lambda: self._of_engines().wake_up(["weights"]))

    async def _wake_cache(self) -> None:
        await self._step("wake cache", lambda: self._of_engines().wake_up(["kv_cache"]))

    async def _sync(self, send: Callable[[], Awaitable[T]]) -> T:
        if self._state == SYNC:  # again
            await self._let_engines_start()
        else:
            await self._wake_weights()
        self.check("send weights")
        sent = await send()
        if self._takes_turns:
            await self._take_off("policy")
        await self._wake_cache()
        return sent

    async def _let_engines_start(self) -> None:
        """Takes the worker off for as long as engines wait to be started."""
        if not self._num_starting:
            return
        worker = self._state.worker
        if worker is not None:
            await self._take_off(worker)
        await self._wait(lambda: not self._num_starting, "wake weights", "the start of an engine")
        if worker is not None:
            await self._bring(worker)

    async def _wait(self, condition: Callable[[], bool], event: Event, missing: str) -> None:
        """Lets others take steps until `condition` holds."""
        try:
            await asyncio.wait_for(self._turn.wait_for(condition), self._start_timeout)
        except TimeoutError:
            raise ColocationError(
                f"cannot {event} for {self._start_timeout:g} s, with {self._state}; first: {missing}"
            ) from None

    def _is_free_for_engines(self) -> bool:
        return self._state.worker is None and self._in_doubt in (None, "recover")

    def _of_engines(self) -> Sleeper:
        if self._engines is None:
            raise ValueError("this run has no engines")
        return self._engines

    async def _step(self, event: Event, action: Callable[[], Awaitable[object]]) -> None:
        """Asks the protocol, then moves. What fails or is cancelled in between leaves the device in doubt."""
        if event not in self._events:
            return
        following = self._following(event)
        self._in_doubt = event
        await action()
        self._state, self._in_doubt = following, None
        self._turn.notify_all()

    def _following(self, event: Event) -> DeviceState:
        if self._in_doubt is not None:
            raise ColocationError(
                f"cannot {event}: what is on the device is in doubt since '{self._in_doubt}' failed; first: recover"
            )
        return after(self._state, event, self._protocol)
