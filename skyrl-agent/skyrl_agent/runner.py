"""Runner of batches: builds trajectories from rows, has the dispatcher run them, and yields their results. Keeps no
state of a batch, so several may run concurrently; they share the dispatcher's limits."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from skyrl_agent.agents.mapping import AGENT_TRAJECTORY_REGISTRY, resolve_agent_class, resolve_class
from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.config.configuration_utils import get_field_from_config
from skyrl_agent.config.task_file import TaskFile, load_task_file
from skyrl_agent.dispatcher.capacity import Capacity
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dotted_paths import import_modules
from skyrl_agent.errors import AgentError, ConfigError, InfraError, TaskRowError, UnavailableError
from skyrl_agent.integrations.base import TrainingRows, get_backend
from skyrl_agent.records import TrajectoryFile
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.training_rows import check_batch, training_rows
from skyrl_agent.types import Announceable, JsonObject, Probeable, Row, SamplingParams, Tokenizer, TrajectoryResult


@dataclass(frozen=True)
class Group:
    """The trajectories of one instance, all of them ended, in the order of their ids."""

    position: int
    """Position of the instance in its batch."""
    results: list[TrajectoryResult]


class AgentRunner:
    """Runner of a task file's agent.

    Args:
        cfg: the task file.
        infer_engine: engine, client or sampling client of the backend.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: the agent, task, tool or backend is unknown, or its settings are invalid.
    """

    def __init__(self, cfg: TaskFile, infer_engine: object, tokenizer: Tokenizer) -> None:
        import_modules(cfg.imports)
        self.cfg, self.tokenizer = cfg, tokenizer
        self.trajectory_cls: type[BaseTrajectory] = resolve_agent_class(cfg.agent_cls, AGENT_TRAJECTORY_REGISTRY)
        self.task = make_task(cfg)
        self.trajectory_cls.check(cfg, self.task)
        named = cfg.data.instance_id_key is not None
        self._capacities = {val: Capacity(cfg.dispatcher, val, named) for val in (False, True)}
        for val_mode in (False, True):
            self._dispatch(val_mode)
        self.backend = get_backend(cfg.generator.infer_backend)
        self.infer_engine = self.backend.make(
            infer_engine=infer_engine, tokenizer=tokenizer, cfg=cfg.generator.backend_config
        )
        self._is_probed = False
        self.file = TrajectoryFile(cfg.output.trajectories, tokenizer) if cfg.output.trajectories else None

    @classmethod
    def from_task(cls, task_yaml: str | Path, infer_engine: object, tokenizer: Tokenizer) -> "AgentRunner":
        """Build a runner of this class; see `AutoAgentRunner.from_task`."""
        return cls(load_task_file(task_yaml), infer_engine, tokenizer)

    async def run(self, input_batch: object, val_mode: bool = False) -> Any:
        """Run one batch to its end. Returns: the form of the backend's trainer.

        Raises:
            TaskRowError: a row is incomplete; nothing was started.
            UnavailableError: as `probe`; nothing was started.
            BatchFailedError: every trajectory failed.
        """
        rows = await self.rows(self.backend.rows_of(input_batch), val_mode)
        check_batch(rows.failures, rows.in_baseline)
        return self.backend.output_of(rows)

    async def stream(self, input_batch: object, val_mode: bool = False) -> AsyncGenerator[Group]:
        """Yield groups as they complete. Leaving the loop early cancels the rest."""
        async with aclosing(self.groups(self.backend.rows_of(input_batch), val_mode)) as groups:
            async for group in groups:
                yield group

    async def rows(self, rows: Sequence[Row], val_mode: bool = False, **options: Any) -> TrainingRows:
        """Run a batch and return its training rows in order. `options`: see `results`."""
        metrics: dict[str, float] = {}
        groups = [group async for group in self.groups(rows, val_mode, metrics=metrics, **options)]
        groups.sort(key=lambda group: group.position)
        return self.training_rows(groups, metrics)

    def training_rows(self, groups: Sequence[Group], metrics: Mapping[str, float] | None = None) -> TrainingRows:
        """Convert groups, of one batch or of several, to training rows in the order given."""
        generator = self.cfg.generator
        return training_rows(
            [group.results for group in groups],
            generator.max_prompt_length,
            profile_tools=generator.profile_tools,
            metrics=metrics,
        )

    async def groups(
        self,
        rows: Sequence[Row],
        val_mode: bool = False,
        *,
        num_trajectories: int | None = None,
        **options: Any,
    ) -> AsyncGenerator[Group]:
        """Yield groups as they complete. Arguments and errors: see `results`."""
        size = num_trajectories or self.num_trajectories(val_mode)
        ended: dict[int, list[TrajectoryResult]] = {}
        run = self.results(rows, val_mode, num_trajectories=num_trajectories, **options)
        async with aclosing(run) as results:
            async for position, result in results:
                group = ended.setdefault(position, [])
                group.append(result)
                if len(group) == size:
                    yield Group(position, sorted(ended.pop(position), key=lambda result: result.trajectory_id))

    async def results(
        self,
        rows: Sequence[Row],
        val_mode: bool = False,
        *,
        num_trajectories: int | None = None,
        sampling_params: SamplingParams | None = None,
        metrics: dict[str, float] | None = None,
        skip: Collection[tuple[int, int]] = (),
    ) -> AsyncGenerator[tuple[int, TrajectoryResult]]:
        """Yield (position of the instance, result) of each trajectory as it ends, after it was appended to
        `output.trajectories`. Leaving the loop early cancels the rest and writes unfinished trajectories.

        Args:
            num_trajectories: overrides the task file's value.
            sampling_params: the trainer's parameters, overridden by the task file. Each trajectory derives a distinct
                seed from `seed`.
            metrics: receives the dispatcher's metrics after all trajectories have ended.
            skip: (position, trajectory id) of trajectories that are not run.

        Raises:
            TaskRowError: a row is incomplete; nothing was started.
            UnavailableError: as `probe`; nothing was started.
            ConfigError: raised by a trajectory; the rest is cancelled.
        """
        instances = self.instances(rows)
        if not self._is_probed:
            await self.probe(instances)
        size = num_trajectories or self.num_trajectories(val_mode)
        params = {**(sampling_params or {}), **self.sampling_params(val_mode)}
        numbered = [
            (
                position,
                self._create_trajectory(instance, number, _set_trajectory_seed(params, position, number), val_mode),
            )
            for position, instance in enumerate(instances)
            for number in range(size)
            if (position, number) not in skip
        ]
        running = {id(trajectory): position for position, trajectory in numbered}
        dispatch = self._dispatch(val_mode)
        try:
            trajectories = [trajectory for _, trajectory in numbered]
            with self._register_sessions(numbered):
                async with aclosing(dispatch.run(trajectories)) as run:  # pyright: ignore[reportArgumentType]
                    async for trajectory in run:
                        position = running.pop(id(trajectory))
                        result = replace(trajectory.result)  # an abandoned stage may still write to it
                        if self.file is not None:
                            await asyncio.to_thread(self.file.append, result, val_mode, position)
                        yield position, result
        finally:
            for position, trajectory in numbered:
                is_cut_off = id(trajectory) in running and trajectory.result.stage_seconds  # empty if it never started
                if is_cut_off and self.file is not None:
                    self.file.append(trajectory.result, val_mode, position)
        if metrics is not None:
            metrics |= dispatch.metrics()

    async def probe(self, instances: Sequence[Instance] = ()) -> None:
        """Check that the model, the tools, the judge and the runtimes of instances work. Runs do so first.

        Raises:
            UnavailableError: one of them does not.
        """
        probes = self.trajectory_cls.probes(self.cfg, self.task, instances)
        if isinstance(self.infer_engine, Probeable):
            probes.append(self.infer_engine.probe())
        errors = [error for error in await asyncio.gather(*probes, return_exceptions=True) if error is not None]
        if unexpected := [error for error in errors if not isinstance(error, AgentError | InfraError)]:
            raise unexpected[0]
        if errors:
            raise UnavailableError("; ".join(dict.fromkeys(map(str, errors))))
        self._is_probed = True

    def _register_sessions(self, numbered: Sequence[tuple[int, BaseTrajectory]]) -> AbstractContextManager[None]:
        """Announce the sessions of a batch's trajectories to an `Announceable` backend."""
        if not isinstance(self.infer_engine, Announceable):
            return nullcontext()
        groups = groupby(numbered, key=lambda entry: entry[0])
        return self.infer_engine.announced([[trajectory.session_id for _, trajectory in group] for _, group in groups])

    def _dispatch(self, val_mode: bool) -> Dispatch:
        return Dispatch(
            self.cfg.dispatcher,
            val_mode=val_mode,
            make_environment=self.task.make_environment,
            close_environment=self.task.close_environment,
            capacity=self._capacities[val_mode],
        )

    def num_trajectories(self, val_mode: bool) -> int:
        """Return the number of trajectories of each instance."""
        generator = self.cfg.generator
        return (generator.val_config.num_trajectories if val_mode else None) or generator.num_trajectories

    def sampling_params(self, val_mode: bool) -> JsonObject:
        """Return the task file's sampling parameters."""
        generator = self.cfg.generator
        return {**generator.sampling_params, **((generator.val_config.sampling_params or {}) if val_mode else {})}

    def instances(self, rows: Sequence[Row]) -> list[Instance]:
        """Build the instances of rows; see `make_instances`."""
        return make_instances(self.cfg, self.task, rows)

    def _create_trajectory(self, instance: Instance, number: int, params: JsonObject, val_mode: bool) -> BaseTrajectory:
        return self.trajectory_cls(
            self.cfg, instance, number, self.infer_engine, self.tokenizer, self.task, params, val_mode
        )


def make_task(cfg: TaskFile) -> BaseTask:
    """Build the task of a task file.

    Raises:
        ConfigError: the task is unknown, or its settings are invalid.
    """
    task_cls = resolve_class(cfg.task, "task")
    if not (isinstance(task_cls, type) and issubclass(task_cls, BaseTask)):
        raise ConfigError(f"task={cfg.task!r} must be a subclass of skyrl_agent.tasks.base.BaseTask")
    try:
        return task_cls(**cfg.task_config)
    except TypeError as error:
        raise ConfigError(f"task_config={cfg.task_config!r} does not fit task={cfg.task!r}: {error}") from error


def make_instances(cfg: TaskFile, task: BaseTask, rows: Sequence[Row]) -> list[Instance]:
    """Build the instances of rows.

    Raises:
        TaskRowError: a field required by the task file or the task is missing.
    """
    return [make_instance(cfg, task, position, row) for position, row in enumerate(rows)]


def make_instance(cfg: TaskFile, task: BaseTask, position: int, row: Row) -> Instance:
    """Build the instance of one row; see `make_instances`."""

    def field(key: str, default: Any) -> Any:
        path = getattr(cfg.data, key)
        if path is None:
            return default
        try:
            return get_field_from_config(path, row)
        except ValueError as error:
            raise TaskRowError(f"row {position} of the batch: data.{key}={error}") from None

    instance_id = field("instance_id_key", None)
    instance = Instance(
        row=field("instance_key", row),
        instance_id=str(position) if instance_id in (None, "") else str(instance_id),
        data_source=str(field("data_source_key", "default")),
    )
    task.check_row(instance)
    return instance


def _set_trajectory_seed(params: JsonObject, position: int, number: int) -> JsonObject:
    """Derive a seed for each trajectory: trajectories with equal seeds would be equal."""
    if params.get("seed") is None:
        return dict(params)
    digest = hashlib.sha256(repr((params["seed"], position, number)).encode()).digest()
    return {**params, "seed": int.from_bytes(digest[:8], "big") >> 1}
