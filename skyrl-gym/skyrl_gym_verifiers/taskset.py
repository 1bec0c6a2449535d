"""Environments of skyrl_gym as an environment of verifiers: rows are tasks, steps are turns of the user."""

import asyncio
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects import parse_message

import skyrl_gym
from skyrl_gym.envs.base_text_env import text_of
from skyrl_gym.episode import Episode


class RowConfig(vf.TasksetConfig):
    """Settings under `--env.taskset`."""

    env_id: str = "gsm8k"
    """Id of the environment, or `module:Class`."""
    data: Path | None = None
    """Dataset rows: .parquet, .jsonl or .json. The environment's own examples by default."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment."""


class RowData(vf.TaskData):
    """One row."""

    env_id: str
    env_config: dict[str, Any]
    extras: dict[str, Any]
    messages: list[dict[str, Any]]
    """The row's prompt; `prompt` has its text alone, as the environment may rewrite the messages."""


class RowTask(vf.Task[RowData]):
    """Task with the reward computed by the environment."""


class RowTaskset(vf.Taskset[RowTask, RowConfig]):
    def load(self) -> Iterator[RowTask]:
        from skyrl_gym.eval.rows import read_tasks

        tasks, _ = read_tasks(self.config.env_id, self.config.data)
        for task in tasks:
            yield RowTask(
                RowData(
                    prompt="\n".join(text_of(message) for message in task.prompt),
                    env_id=self.config.env_id,
                    env_config={**task.env_config, **self.config.env_config},
                    extras=task.extras,
                    messages=task.prompt,
                ),
                self.config.task,
            )


class RowEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class RowEnv(vf.Env[RowEnvConfig]):
    """One episode: the environment's observations are the user's turns. The reward is the sum over its steps."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        data = task.data
        env = skyrl_gym.make(data.env_id, env_config=data.env_config or None, extras=dict(data.extras))
        episode = Episode(env)
        total = 0.0
        try:
            opening = await asyncio.to_thread(episode.init, data.messages)
            prompted = task.with_data(prompt=[parse_message(message) for message in opening])
            async with agents.agent.interaction(prompted) as interaction:
                segment = await interaction.turn()
                while not segment.terminated:
                    output = await asyncio.to_thread(episode.step, segment.messages[-1].content or "")
                    total += output["reward"]
                    if output["done"]:
                        break
                    segment = await interaction.turn([parse_message(message) for message in output["observations"]])
                metrics = await asyncio.to_thread(episode.metrics)
        finally:
            await asyncio.to_thread(episode.close)
        interaction.trace.record_reward("reward", total)
        interaction.trace.record_metrics(
            {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        )
