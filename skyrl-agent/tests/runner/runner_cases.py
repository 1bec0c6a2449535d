"""A task about numbers and an agent that asks once, by dotted path as users' own are."""

import asyncio
from typing import Any

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.chat.transitions import Observation, TokensWithLogprobs, Transition
from skyrl_agent.config.task_file import TaskFile
from skyrl_agent.errors import ConfigError, InfraError, TaskRowError
from skyrl_agent.finish import FINISH
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.types import Message


class Doubling(BaseTask):
    """Asks for twice a number; may be told to fail."""

    def __init__(self, right: float = 1.0) -> None:
        self.right = right

    def check_row(self, instance: Instance) -> None:
        if "number" not in instance.row:
            raise TaskRowError(f"Doubling: row of instance {instance.instance_id} has no field 'number'")

    def get_instruction(self, instance: Instance) -> list[Message]:
        return [{"role": "user", "content": f"double {instance.row['number']}"}]

    async def evaluate_result(self, result: Any, instance: Instance, trajectory: Any, runtime: Any = None) -> float:
        if instance.row.get("judge") == "away":
            raise InfraError("the judge is away")
        return self.right if result == str(2 * instance.row["number"]) else 0.0


class OneQuestion(BaseTrajectory):
    """Asks the model once. `seconds` of the row: how long it thinks first."""

    @classmethod
    def check(cls, cfg: TaskFile, task: BaseTask) -> None:
        if cfg.agent_config:
            raise ConfigError(f"agent_config: OneQuestion takes none; got {cfg.agent_config}")

    async def initialize_trajectory(self) -> None:
        if self.instance.row.get("sandbox") == "broken":
            raise InfraError("no sandbox")

    async def generate_trajectory(self) -> None:
        await asyncio.sleep(self.instance.row.get("seconds", 0.0))
        messages = self.task.get_instruction(self.instance)
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text, meta = await self.infer_engine.async_generate_ids(
            input_ids=ids, sampling_params=self.sampling_params, request_id=f"{id(self)}"
        )
        self.result.transitions = [Transition(Observation(ids), TokensWithLogprobs.from_reply(text, meta))]
        self.result.messages = [*messages, {"role": "assistant", "content": text}]
        self.result.results, self.result.finish_reason, self.result.num_steps = text, FINISH, 1

    async def evaluate_trajectory(self) -> None:
        self.result.reward = float(
            await self.task.evaluate_result(self.result.results, self.instance, self.result)  # type: ignore[arg-type]
        )


class OneQuestionAgent:
    """The name in task files."""
