"""Rollout engines in Ray processes: the engine in its process, and a handle that looks like the engine from outside."""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from skyrl_train.inference_engines.base import (
    EngineInfo,
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    PauseMode,
)
from skyrl_train.utils.ray_calls import Call, answer_of, wait_for_all
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport, WeightSyncInitInfo, WeightUpdateRequest

CONTROL_TIMEOUT_SECONDS = 600.0
"""The deadline of everything but generating: pauses, weight updates, sleep."""


class EngineProcess:
    """An engine in a process of its own.

    Args:
        make_engine: creates the engine, there.
        log_file: where the process writes.
    """

    def __init__(self, make_engine: Callable[[], InferenceEngineInterface], log_file: str):
        from skyrl_train.workers.actor_group import prepare_process

        prepare_process(log_file)
        self._engine = make_engine()

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._engine, method)(*args)

    async def pid(self) -> int:
        import os

        return os.getpid()


class RayWrappedInferenceEngine(InferenceEngineInterface):
    """An engine that runs in another process. Every call has a deadline; a dead process is a WorkerError."""

    def __init__(self, actor: Any, name: str, log_file: str, request_timeout_seconds: float):
        self._actor = actor
        self._name = name
        self._log_file = log_file
        self._request_timeout_seconds = request_timeout_seconds

    def start(self, method: str, *args: Any) -> Call:
        """Starts a call; see `skyrl_train.utils.ray_calls` for waiting."""
        return Call(self._actor.call.remote(method, *args), self._name, self._log_file)

    async def _control(self, method: str, *args: Any) -> Any:
        return await answer_of(self.start(method, *args), CONTROL_TIMEOUT_SECONDS, "the deadline of control calls")

    async def describe(self) -> EngineInfo:
        return await self._control("describe")

    async def check_health(self) -> None:
        await self._control("check_health")

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        call = self.start("generate", input_batch)
        return await answer_of(call, self._request_timeout_seconds, "generator.request_timeout_seconds")

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        await self._control("pause_generation", mode)

    async def resume_generation(self) -> None:
        await self._control("resume_generation")

    async def abort_generation(self) -> None:
        await self._control("abort_generation")

    async def sleep(self, level: int = 1) -> None:
        await self._control("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._control("wake_up", tags)

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        await self._control("init_weight_update_communicator", init_info)

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self._control("update_named_weights", request)

    async def finish_weight_update(self, version: int) -> WeightReport:
        return await self._control("finish_weight_update", version)

    async def load_lora(self, request: LoraLoadRequest) -> WeightReport:
        return await self._control("load_lora", request)

    async def unload_lora(self, name: str) -> None:
        await self._control("unload_lora", name)

    async def weight_version(self) -> int:
        return await self._control("weight_version")

    async def reset_prefix_cache(self) -> None:
        await self._control("reset_prefix_cache")

    async def teardown(self) -> None:
        """Ends the engine's process."""
        self.kill()

    def pid(self) -> int:
        return ray.get(self._actor.pid.remote(), timeout=CONTROL_TIMEOUT_SECONDS)

    def kill(self) -> None:
        ray.kill(self._actor)


class RayEngines:
    """All engines, for the weight sender in the policy's process (`skyrl_train.weight_sync.sender.EngineHandles`)."""

    def __init__(self, engines: Sequence[RayWrappedInferenceEngine]):
        self._engines = list(engines)

    def call_all(self, method: str, *args: Any) -> list[Call]:
        return [engine.start(method, *args) for engine in self._engines]

    def call_each(self, method: str, args: Sequence[Any]) -> list[Call]:
        return [engine.start(method, arg) for engine, arg in zip(self._engines, args, strict=True)]

    def wait(self, calls: list[Call]) -> list[Any]:
        return wait_for_all(calls, CONTROL_TIMEOUT_SECONDS, "the deadline of control calls")

    def share(self, value: Any) -> Any:
        return ray.put(value)
