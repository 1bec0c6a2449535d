"""Dispatchers as functions of the published convention: `await fn(cfg, trajectories, init_fn=..., ...)`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.dispatch import METHODS, Dispatch
from skyrl_agent.dispatcher.plan import PLANS
from skyrl_agent.dispatcher.registry import DISPATCHER_REGISTRY, Dispatcher, register_dispatcher
from skyrl_agent.finish import ERROR_EVALUATION, ERROR_RUNTIME
from skyrl_agent.types import Failure, JsonObject, Stage, TrajectoryResult

__all__ = ["DISPATCHER_REGISTRY", "register_dispatcher"]

logger = logging.getLogger(__name__)


def _build_published(type_name: str) -> Dispatcher:
    async def dispatch(
        cfg: Mapping[str, Any],
        trajectories: Sequence[Any] | Mapping[Any, Any],
        init_fn: str = METHODS["initialize"],
        run_fn: str = METHODS["generate"],
        eval_fn: str = METHODS["evaluate"],
    ) -> None:
        """Run trajectories to their end.

        Args:
            cfg: keys of `DispatcherSection`; others are not read. `envs`: environments of `async_fix_pool`.
            trajectories: in a sequence, or `[instance][trajectory_id]`; any objects with the three methods. A failure
                of one without `fail` is written to `finish_reason` and `error` of its `result` (a dict).
            init_fn, run_fn, eval_fn: names of the methods, called without arguments.
        """
        known = {key: cfg[key] for key in DispatcherSection.model_fields if cfg.get(key) is not None}
        settings: JsonObject = {"methods": {"initialize": init_fn, "generate": run_fn, "evaluate": eval_fn}}
        if envs := cfg.get("envs"):
            known["num_environments"] = len(envs)

            async def environment(place: int) -> Any:
                return envs[place]

            settings["make_environment"] = environment
        section = DispatcherSection.model_validate(known | {"type": type_name})
        async for _ in Dispatch(section, **settings).run([_to_trajectory(it) for it in _flatten(trajectories)]):
            pass

    dispatch.__name__ = dispatch.__qualname__ = type_name
    return dispatch


DISPATCHER_REGISTRY.update({name: _build_published(name) for name in PLANS})


def _flatten(trajectories: Sequence[Any] | Mapping[Any, Any]) -> list[Any]:
    if not isinstance(trajectories, Mapping):
        return list(trajectories)
    return [
        it for of_one in trajectories.values() for it in (of_one.values() if isinstance(of_one, Mapping) else of_one)
    ]


def _to_trajectory(it: Any) -> Any:
    return it if hasattr(it, "fail") else _Plain(it)


class _Plain:
    """Adapter from an object with only the stage methods to `Trajectory`."""

    def __init__(self, it: Any) -> None:
        self._it = it
        self.trajectory_id = getattr(it, "trajectory_id", 0)
        self.result = TrajectoryResult()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._it, name)

    @property
    def environment(self) -> Any:
        return self._it.environment

    @environment.setter
    def environment(self, environment: Any) -> None:
        self._it.environment = environment

    @property
    def wants_evaluation(self) -> bool:
        return self.result.failure is None

    def fail(self, stage: Stage, error: BaseException, attempts: int = 1) -> None:
        message = f"{type(error).__name__}: {error}"
        self.result.failure = Failure(stage, "infrastructure", message, attempts)
        self.result.finish_reason = ERROR_EVALUATION if stage == "evaluate" else ERROR_RUNTIME
        logger.warning("a trajectory failed in %s: %s", stage, message)
        if isinstance(told := getattr(self._it, "result", None), dict):
            told |= {"finish_reason": self.result.finish_reason, "error": message}

    async def close(self) -> None:
        if hasattr(self._it, "close"):
            await self._it.close()

    async def restart(self) -> None:
        await self.close()
