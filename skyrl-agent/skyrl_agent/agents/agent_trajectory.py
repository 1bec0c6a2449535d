"""Trajectory of one agent on one instance: runtime, conversation, evaluation."""

import inspect
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from skyrl_agent.agents.loop import Agent
from skyrl_agent.agents.mapping import resolve_class
from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.config.task_file import RuntimeSection, TaskFile
from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import check_runtime_section, make_runtime, merge_spec, probe_runtime
from skyrl_agent.runtimes.base import Runtime, RuntimeSpec
from skyrl_agent.runtimes.recorded import RecordedRuntime
from skyrl_agent.tasks.base import BaseTask, Instance, Judgement
from skyrl_agent.tools.base import BaseTool
from skyrl_agent.tools.factory import make_tools
from skyrl_agent.tools.in_runtime import RuntimeTool
from skyrl_agent.types import JsonObject
from skyrl_gym.suggestions import did_you_mean

LENDS_NOTHING = ("auto", "async_pipeline", "async_batch", "async_batch_bounded")
"""Types of dispatchers."""
_GIVEN = ("traj_config", "infer_engine", "tokenizer", "tools", "runtime", "trajectory_id", "parent")
"""Parameters of an agent that are no keys of `agent_config`."""


class AgentTrajectory(BaseTrajectory):
    """Trajectory of any task. A task that names a `runtime_spec` gets a runtime, unless the dispatcher supplies an
    environment, which is not closed here."""

    agent: Agent | None = None
    runtime: Runtime | None = None

    @classmethod
    def check(cls, cfg: TaskFile, task: BaseTask) -> None:
        agent_cls = _resolve_agent_class(cfg)
        known = [name for name in inspect.signature(agent_cls).parameters if name not in _GIVEN]
        for name in cfg.agent_config:
            if name not in known:
                raise ConfigError(
                    f"unknown key agent_config.{name}; {did_you_mean(name, known, prefix='agent_config.')}"
                )
        absent: Any = None  # settings are validated without model and tokenizer
        tools = agent_cls.tool_entries(cfg.tools, task)
        agent = agent_cls(cfg.generator, absent, absent, tools=tools, **cfg.agent_config)
        check_runtime_section(cfg.runtime)
        if type(task).runtime_spec is not BaseTask.runtime_spec:
            return
        if task.make_environment is not None and cfg.dispatcher.type in LENDS_NOTHING:
            raise ConfigError(
                f"task={cfg.task!r} needs environments from the dispatcher: set dispatcher.type to async_fix_pool; "
                f"got {cfg.dispatcher.type}"
            )
        for tool in agent.toolbox.tools.values():
            if isinstance(tool, RuntimeTool) and task.make_environment is None:
                raise tool.without_runtime()

    @classmethod
    def probes(
        cls, cfg: TaskFile, task: BaseTask, instances: Sequence[Instance]
    ) -> list[Coroutine[object, None, None]]:
        probes = super().probes(cfg, task, instances)
        probes += [_probe_tool(tool) for tool in make_tools(_resolve_agent_class(cfg).tool_entries(cfg.tools, task))]
        if task.make_environment is None:
            probes.append(_probe_runtimes(cfg.runtime, task, instances))
        return probes

    async def initialize_trajectory(self) -> None:
        spec = self.task.runtime_spec(self.instance)
        if self.environment is not None and self.task.make_environment is not None:  # otherwise the index of a slot
            self.runtime = self.environment
        elif spec is not None:
            self.runtime = self._make_runtime(spec)
            await self.runtime.start()
        if self.runtime is not None:
            await self.task.initialize_runtime(self.instance, self.runtime)

    async def generate_trajectory(self) -> None:
        if isinstance(self.runtime, RecordedRuntime):
            self.runtime.stage = "generate"
        agent = self.agent = self._make_agent()
        try:
            outcome = await agent.run(self.task.get_instruction(self.instance), self.instance)
            self.result.finish_reason, self.result.results = outcome
            if self.runtime is not None:
                self.result.results = await self.task.complete_runtime(self.instance, self.runtime, outcome.result)
        finally:
            self._copy_records(agent)
            await self._close_runtime()

    async def evaluate_trajectory(self) -> None:
        spec = self.task.evaluation_runtime_spec(self.instance)
        async with self._open_evaluation_runtime(spec) as runtime:
            judgement = await self.task.evaluate_result(self.result.results, self.instance, self.result, runtime)
        if not isinstance(judgement, Judgement):
            judgement = Judgement(float(judgement))
        if judgement.not_run:  # the first runtime has seen the agent's changes
            async with self._open_evaluation_runtime(spec or self.task.runtime_spec(self.instance)) as runtime:
                assert runtime is not None, "tests need a runtime"
                judgement = await self.task.recheck(self.instance, judgement, runtime)
        self.result.reward, self.result.reward_parts = judgement.reward, dict(judgement.parts)
        self.result.finish_reason = judgement.finish_reason or self.result.finish_reason

    async def close(self) -> None:
        if self.agent is not None:
            self.agent.cancel()
        await self._close_runtime()

    async def _close_runtime(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None and runtime is not self.environment:
            await runtime.close()

    def _make_runtime(self, spec: RuntimeSpec) -> RecordedRuntime:
        return RecordedRuntime(make_runtime(merge_spec(self.cfg.runtime, spec)), self.result.sandbox)

    @asynccontextmanager
    async def _open_evaluation_runtime(self, spec: RuntimeSpec | None) -> AsyncIterator[Runtime | None]:
        if spec is None:
            yield None
            return
        self.runtime = runtime = self._make_runtime(spec)
        runtime.stage = "evaluate"
        try:
            await runtime.start()
            yield runtime
        finally:
            await self._close_runtime()

    def _make_agent(self) -> Agent:
        agent_cls = _resolve_agent_class(self.cfg)
        agent = agent_cls(
            self.cfg.generator.model_copy(update={"sampling_params": self.sampling_params}),
            self.infer_engine,
            self.tokenizer,
            tools=agent_cls.tool_entries(self.cfg.tools, self.task),
            runtime=self.runtime,
            trajectory_id=f"{self.instance.instance_id}-{self.trajectory_id}-{self.session_id[:8]}",
            **self.cfg.agent_config,
        )
        agent.agent_id = self.session_id
        return agent

    def _copy_records(self, agent: Agent) -> None:
        """Copy the agent's records to the result, after a failure too."""
        result = self.result
        result.messages, result.transitions = agent.get_messages(), agent.get_transitions()
        result.tool_calls, result.num_steps = agent.get_tool_calls(), agent.num_steps
        if agent.sub_agents:
            result.state = {"sub_agents": [_to_record(sub_agent) for sub_agent in agent.sub_agents]}
            result.metrics["sub_agents"] = float(len(agent.sub_agents))


async def _probe_tool(tool: BaseTool) -> None:
    try:
        await tool.probe()
    finally:
        await tool.close()


async def _probe_runtimes(section: RuntimeSection, task: BaseTask, instances: Sequence[Instance]) -> None:
    """Check the settings of all runtimes, and probe the first one with an image and the first one without: a server or
    a machine may be able to make one of them alone."""
    first: dict[bool, tuple[Instance, RuntimeSpec]] = {}
    for instance in instances:
        if (spec := task.runtime_spec(instance)) is None:
            continue
        try:
            spec = merge_spec(section, spec)
        except ConfigError as error:
            raise ConfigError(f"row {instance.instance_id}: {error}") from error
        first.setdefault(bool(spec.image), (instance, spec))
    for instance, spec in first.values():
        await _probe_runtime(spec, task, instance)


async def _probe_runtime(spec: RuntimeSpec, task: BaseTask, instance: Instance) -> None:
    await probe_runtime(spec)
    if spec.kind == "local" or (spec.kind == "auto" and not (spec.url or spec.image)):  # others may take minutes
        runtime = make_runtime(spec)
        try:
            await runtime.start()
            await task.probe_runtime(instance, runtime)
        finally:
            await runtime.close()


def _resolve_agent_class(cfg: TaskFile) -> type[Agent]:
    return resolve_class(cfg.agent_cls, "agent_cls")


def _to_record(agent: Agent) -> JsonObject:
    return {
        "messages": agent.get_messages(),
        "finish_reason": agent.outcome.finish_reason if agent.outcome else None,
        "num_steps": agent.num_steps,
        "sub_agents": [_to_record(sub_agent) for sub_agent in agent.sub_agents],
    }
