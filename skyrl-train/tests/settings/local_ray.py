"""Ray's calls within this process: an actor is an object with a thread and an event loop, a reference is a future. A
whole run then takes a fraction of a second, and everything above Ray is the real thing."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from skyrl_train.entrypoints import engines
from skyrl_train.inference_engines import ray_wrapped_inference_engine
from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.inference_engines.ray_wrapped_inference_engine import ProcessPlace, RayWrappedInferenceEngine
from skyrl_train.orchestration import actor_group, bundles, node_check
from skyrl_train.testing.learning import one_process_group
from skyrl_train.utils import ray_calls
from skyrl_train.workers import model_worker
from skyrl_train.workers.model_worker import ModelWorker


class Reference:
    """A call's answer to be."""

    def __init__(self, future: "Future[Any]"):
        self.future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


_WORKERS = ThreadPoolExecutor(1)
"""The thread of all workers: torch plans the collectives of a sharded model once a thread."""


class Actor:
    """An object that is made, and computes, in a thread; its coroutines run in a loop of its own."""

    def __init__(self, cls: Callable[..., Any], args: tuple[Any, ...], calls: list[tuple[str, tuple[Any, ...]]]):
        self._calls = calls
        self._is_worker = cls is actor_group.WorkerProcess
        self._thread = _WORKERS if self._is_worker else ThreadPoolExecutor(1)
        self._loop = LoopThread("actor")
        self._has_ended = False
        # All models are loaded in one thread: meanwhile transformers changes classes that others use.
        self._object = _WORKERS.submit(cls, *args)

    def __getattr__(self, method: str) -> "Method":
        return Method(self, method)

    def start(self, method: str, args: tuple[Any, ...]) -> Reference:
        answer: Future[Any] = Future()
        self._calls += (
            args[0]
            if method == "call_in_turn"
            else [(args[0], args[1:]) if method in ("call", "control") else (method, args)]
        )

        def run() -> None:
            try:
                found = getattr(self._object.result(), method)(*args)
            except Exception as error:
                answer.set_exception(_task_error(error))
                return
            if inspect.iscoroutine(found):
                asyncio.run_coroutine_threadsafe(found, self._loop._loop).add_done_callback(settle)
            else:
                answer.set_result(found)

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            answer.set_result(done.result()) if error is None else answer.set_exception(_task_error(error))

        self._thread.submit(run)
        return Reference(answer)

    def end(self) -> None:
        """End thread and loop, whose file descriptors a test process would run out of. May be called more than once."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._is_worker:
            sender = None if self._object.exception() else getattr(self.worker, "_sender", None)
            if sender is not None:  # a process that ends takes its shared memory along
                sender.close()
            self._loop.stop()
        else:
            self._thread.submit(self._loop.stop)  # after the calls that were made before
            self._thread.shutdown(wait=False)

    @property
    def worker(self) -> ModelWorker:
        """What a group's process wraps."""
        return self._object.result()._worker


def _task_error(error: BaseException) -> BaseException:
    is_ordinary = isinstance(error, Exception) and not isinstance(error, RayActorError)
    return RayTaskError("local", str(error), error) if is_ordinary else error


class Method:
    def __init__(self, actor: Actor, name: str):
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Reference:
        return self._actor.start(self._name, args)


class LocalRay:
    """What our modules call of `ray`."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.options: list[dict[str, Any]] = []
        """Of each actor, in the order of their starts."""
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Methods of workers and engines, with their arguments."""
        self.most_requests = 0
        """That an engine worked on at a time."""
        self.num_to_die = 0
        """Requests at which an engine dies."""

    def remote(self, cls: Callable[..., Any]) -> "ActorClass":
        return ActorClass(self, cls)

    def wait(
        self, references: Sequence[Reference], num_returns: int, timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        done, _ = wait_for_futures([r.future for r in references], timeout, FIRST_COMPLETED)
        first = [r for r in references if r.future in done][:num_returns]
        return first, [r for r in references if r not in first]

    def get(self, reference: Reference, timeout: float) -> Any:
        try:
            return reference.future.result(timeout)
        except TimeoutError:
            raise GetTimeoutError from None

    def cancel(self, reference: Reference) -> None:
        reference.future.cancel()

    def kill(self, actor: Actor) -> None:
        actor.end()

    def get_runtime_context(self) -> "LocalRay":
        return self

    def get_job_id(self) -> str:
        return "local"

    def get_node_id(self) -> str:
        return NODE

    def nodes(self) -> list[dict[str, Any]]:
        return []


NODE = "this node"


class LocalPlacementGroup:
    """Places that are free at once, on one node."""

    def __init__(self, bundles: Sequence[dict[str, float]], strategy: str, name: str):
        self.bundle_count = len(bundles)

    def wait(self, timeout_seconds: float) -> bool:
        return True


def _placement_group_table(group: LocalPlacementGroup | None = None) -> dict[str, Any]:
    return {} if group is None else {"bundles_to_node_id": dict.fromkeys(range(group.bundle_count), NODE)}


class ActorClass:
    def __init__(self, ray: LocalRay, cls: Callable[..., Any]):
        self._ray, self._cls = ray, cls
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> "ActorClass":
        self._options = options
        return self

    def remote(self, *args: Any) -> Actor:
        actor = Actor(self._cls, args, self._ray.calls)
        self._ray.actors.append(actor)
        self._ray.options.append(self._options)
        return actor


class LocalEngine:
    """An engine in this process, in place of `EngineProcess`, which would lead a process group and be killed by it."""

    def __init__(self, ray: LocalRay, make_engine: Any, log_file: str):
        self._engine = make_engine()
        self._ray = ray
        self._num_requests = 0
        self._is_dead = False

    async def generate(self, input_batch: Any) -> Any:
        if self._ray.num_to_die:
            self._ray.num_to_die -= 1
            self._is_dead = True
        self._check()
        self._num_requests += 1
        self._ray.most_requests = max(self._ray.most_requests, self._num_requests)
        try:
            return await self._engine.generate(input_batch)
        finally:
            self._num_requests -= 1

    async def control(self, method: str, *args: Any) -> Any:
        self._check()
        return await getattr(self._engine, method)(*args)

    async def check_health(self, patience_seconds: float) -> None:
        self._check()
        await self._engine.check_health()

    def _check(self) -> None:
        if self._is_dead:
            raise RayActorError

    async def place(self) -> ProcessPlace:
        return ProcessPlace("this process", 0, 0.0)


@contextmanager
def local_ray() -> Iterator[LocalRay]:
    """Within, workers and engines are threads of this process, each group one rank."""
    ray = LocalRay()
    with pytest.MonkeyPatch.context() as patch, one_process_group():
        for module in (actor_group, bundles, node_check, ray_calls, ray_wrapped_inference_engine):
            patch.setattr(module, "ray", ray)
        patch.setattr(bundles, "placement_group", LocalPlacementGroup)
        patch.setattr(bundles, "placement_group_table", _placement_group_table)
        for module in (actor_group, bundles):
            patch.setattr(module, "remove_placement_group", lambda group: None)
        patch.setattr(actor_group, "prepare_process", lambda log_file: None)  # it redirects the process's output
        patch.setattr(
            engines, "engine_actor", lambda **options: ray.remote(partial(LocalEngine, ray)).options(**options)
        )
        patch.setattr(RayWrappedInferenceEngine, "kill", lambda self: ray.kill(self._actor))
        patch.setattr(model_worker, "node_address", lambda: "127.0.0.1")
        try:
            yield ray
        finally:
            for actor in ray.actors:
                actor.end()
