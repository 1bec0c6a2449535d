"""Environment sessions: awaitable methods with deadlines and named errors. Independent of tokens.

Environments may block (tools, databases, sandboxes), so their methods run in daemon threads: a call that never returns
fails only its own trajectory, after a deadline, and does not prevent the process from exiting.
"""

import asyncio
import contextlib
import contextvars
import copy
import inspect
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from loguru import logger

import skyrl_gym
from skyrl_gym.core import Env
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.episode import has_seed_argument
from skyrl_gym.error import InfraError
from skyrl_gym.finite_numbers import describe, to_finite
from skyrl_gym.waits import waiting
from skyrl_train.errors import FailureKind, RolloutError
from skyrl_train.types import ConversationType
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.utils.tracebacks import format_last_location

T = TypeVar("T")

LONG_WAIT_SECONDS = 60.0
"""Time that calls of environments wait for threads while the process is idle, all together, before a warning."""
THREADS = "the threads of environments (environment.skyrl_gym.max_env_workers)"
"""Name under which waits for a thread, and calls that have one, are recorded."""

_IMMEDIATE = (Env.close, BaseTextEnv.init, BaseTextEnv.close, BaseTextEnv.get_metrics)
"""Methods that do nothing where an environment does not define its own: they need no thread."""

_idle: list[queue.SimpleQueue[Callable[[], None]]] = []
"""Threads that have nothing to do, by the queues that they wait at. A fork has none of its parent's threads."""
os.register_at_fork(after_in_child=_idle.clear)

DEADLINE_SETTING = "environment.skyrl_gym.env_timeout_seconds"


class DeadlineExceeded(Exception):
    """Error of a call that did not return in time. It may still be running."""


class DaemonThreads:
    """Runner of blocking calls concurrently with the event loop.

    Args:
        max_workers: maximum number of concurrent calls; 0 runs them on the event loop without a deadline (for
            debugging).
        timeout_seconds: deadline of one call, measured from its start.
    """

    def __init__(self, max_workers: int, timeout_seconds: float) -> None:
        self.max_workers = max_workers
        self.timeout_seconds = timeout_seconds
        self._waited_seconds = 0.0
        self._has_warned = False
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, function: Callable[..., T], *args: object, discard: Callable[[T], None] | None = None) -> T:
        """Return the result of `function(*args)`; a coroutine function is awaited directly.

        Args:
            discard: called with a result that arrives after the call was abandoned.

        Raises:
            DeadlineExceeded: the call exceeded the deadline. Its slot is released.
        """
        if inspect.iscoroutinefunction(function):
            return await self._wait_until_deadline(function(*args))
        if self.max_workers == 0:
            result = function(*args)
        else:
            async with self._acquire_slot():
                result = await self._wait_until_deadline(_run_in_daemon_thread(partial(function, *args), discard))
        # A plain method may still return a coroutine (a decorator, a functools.partial).
        if inspect.isawaitable(result):
            return await self._wait_until_deadline(result)
        return result  # pyright: ignore[reportReturnType]

    @contextlib.asynccontextmanager
    async def _acquire_slot(self) -> AsyncIterator[None]:
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_workers))
        with waiting("a free thread", on=THREADS) if slots.locked() else contextlib.nullcontext():
            began, computed = time.monotonic(), time.process_time()
            await slots.acquire()
            self._record_wait(time.monotonic() - began, time.process_time() - computed)
        try:
            yield
        finally:
            slots.release()

    def _record_wait(self, seconds: float, computed: float) -> None:
        """Warn once if calls have waited long for threads although the process was mostly idle, since rollouts and
        engines then wait as well. More threads do not help environments that compute."""
        if computed < seconds / 2:
            self._waited_seconds += seconds
        if self._waited_seconds > LONG_WAIT_SECONDS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "environment calls have waited {:.0f} s for one of {} threads while this process was idle: set "
                "environment.skyrl_gym.max_env_workers to the number of rollouts in flight",
                self._waited_seconds,
                self.max_workers,
            )

    async def _wait_until_deadline(self, awaitable: Awaitable[T]) -> T:
        deadline = asyncio.timeout(self.timeout_seconds)
        try:
            async with deadline:
                return await awaitable
        except TimeoutError:
            if deadline.expired():
                raise DeadlineExceeded(f"did not return within {self.timeout_seconds:g} s") from None
            raise


def _run_in_daemon_thread(function: Callable[[], T], discard: Callable[[T], None] | None) -> "asyncio.Future[T]":
    """Run `function` in an idle or new daemon thread. Cancelling the future abandons the call."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            if error is None and discard is not None:
                threading.Thread(target=discard, args=(result,), daemon=True).start()
        elif error is None:
            outcome.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            outcome.set_exception(error)
        else:  # a future cannot carry these: they would end the event loop, or the generator that awaits it
            outcome.set_exception(RuntimeError(f"raised {type(error).__name__}: {error}"))

    def run() -> T:
        with waiting("a call of an environment", who=THREADS):
            return function()

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(run)
        except BaseException as raised:  # carried to the caller, whatever it is
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the event loop is closed: the result is not awaited
            logger.debug("a call in a thread ended after its event loop had closed")

    context = contextvars.copy_context()
    try:
        works = _idle.pop()
    except IndexError:
        works = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(works,), name="skyrl-gym-env", daemon=True).start()
    works.put(work)
    return outcome


def _serve(works: "queue.SimpleQueue[Callable[[], None]]") -> None:
    """Run the calls received through the queue, which is in `_idle` while empty. Keeps no reference to completed calls,
    since an environment may use much memory."""
    while True:
        works.get()()
        _idle.append(works)


@dataclass(frozen=True)
class StepResult:
    """Validated result of one environment step."""

    reward: float
    done: bool
    truncated: bool = False
    """True if a limit ended the episode, not the task."""
    observations: ConversationType = field(default_factory=list)
    postprocessed_action: str | None = None


class EnvironmentSession:
    """Environment of one trajectory. Every error is a `RolloutError` that names the environment and the method.

    Args:
        env_class: id in skyrl_gym's registry.
        env_config: the environment's section of `environment.skyrl_gym`.
        extras: the dataset row's other columns; copied for the environment.
        seed: episode seed, for environments whose `init` accepts one.
    """

    def __init__(
        self,
        threads: DaemonThreads,
        env_class: str,
        env_config: object,
        extras: dict[str, Any],
        seed: int | None = None,
    ) -> None:
        self.threads = threads
        self.env_class = env_class
        self.env_config = env_config
        self.extras = extras
        self.seed = seed
        self._env: Any = None
        self._truncated: bool | None = None

    async def init(self, prompt: ConversationType) -> ConversationType:
        """Create the environment and start its episode; return the initial chat history."""
        self._env = await self._call("make", self._make, discard=lambda env: env.close())
        arguments = (prompt, self.seed) if has_seed_argument(self._env) else (prompt,)
        answer = await self._call("init", self._env.init, *arguments)
        try:
            history, _ = answer
        except (TypeError, ValueError):
            raise self._convert_fault("environment", "init", "must return (messages, info)") from None
        self._check_messages("init", history)
        return history

    def _make(self) -> Any:
        return skyrl_gym.make(self.env_class, env_config=self.env_config, extras=copy.deepcopy(self.extras))

    async def step(self, text: str) -> StepResult:
        """Step the environment with the text of a completion."""
        output = await self._call("step", self._env.step, text)
        if not isinstance(output, dict) or "done" not in output:
            raise self._convert_fault(
                "environment", "step", f"must return a dict with reward, done, observations; got {output!r}"
            )
        reward = to_finite(output.get("reward"))
        if reward is None:
            given = describe(output.get("reward"))
            raise self._convert_fault(
                "reward", "step", f"must return a finite number as reward in every step; got {given}"
            )
        if "truncated" in output:
            self._truncated = bool(output["truncated"])
        observations = output.get("observations") or []
        self._check_messages("step", observations)
        return StepResult(
            reward=reward,
            done=bool(output["done"]),
            truncated=bool(output.get("truncated", False)),
            observations=list(observations),
            postprocessed_action=output.get("postprocessed_action"),
        )

    async def get_metrics(self) -> dict[str, Any]:
        """Return the episode's metrics, including `truncated` if the environment reports it."""
        known = {} if self._truncated is None else {"truncated": self._truncated}
        if not hasattr(self._env, "get_metrics"):
            return known
        metrics = await self._call("get_metrics", self._env.get_metrics)
        if not isinstance(metrics, Mapping):
            given = describe(metrics)
            raise self._convert_fault(
                "environment", "get_metrics", f"must return a dict of metrics (may be empty); got {given}"
            )
        return known | dict(metrics)

    async def close(self) -> None:
        """Close the environment if it was created."""
        if self._env is not None:
            await self._call("close", self._env.close)

    async def _call(self, method: str, function: Callable[..., T], *args: object, **kwargs: Any) -> T:
        if getattr(function, "__func__", None) in _IMMEDIATE:
            return function(*args)
        name = f"environment {self.env_class!r}"
        try:
            with waiting(f"{method} of {name}", deadline=self.threads.timeout_seconds):
                return await self.threads.call(function, *args, **kwargs)
        except RolloutError:
            raise
        except DeadlineExceeded as error:
            late = f"{error} ({DEADLINE_SETTING})"
            why = await asyncio.to_thread(write_explanation, f"{method} of {name} {late}")
            raise self._convert_fault("environment", method, late + why) from error
        except InfraError as error:
            raise self._convert_fault(
                "infrastructure", method, f"depends on an unavailable service: {error}"
            ) from error
        except Exception as error:  # environments are user code: their errors end only this trajectory
            what = f"raised {type(error).__name__}: {error}{format_last_location(error)}"
            raise self._convert_fault("environment", method, what) from error

    def _check_messages(self, method: str, messages: object) -> None:
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise self._convert_fault(
                "environment", method, f"must return a list of chat messages; got {messages!r:.200}"
            )

    def _convert_fault(self, kind: FailureKind, method: str, what: str) -> RolloutError:
        return RolloutError(kind, f"environment {self.env_class!r}: {method} {what}")
