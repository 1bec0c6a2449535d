"""An agent loop manager for verl: `actor_rollout_ref.rollout.agent.agent_loop_manager_class` names it, and
`+skyrl_agent.task_yaml` the task file. Not run here: it needs verl and a GPU."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer
from verl import DataProto  # pyright: ignore[reportMissingImports]

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.errors import ConfigError
from skyrl_agent.integrations.base import TrainingRows
from skyrl_agent.integrations.verl.verl_backend import rows_of
from skyrl_agent.training_rows import check_batch

__all__ = ["SkyAgentLoopManager"]


class SkyAgentLoopManager:
    """Replacement of verl's `AgentLoopManager`. The batch has each instance `rollout.n` times in a row; a trajectory is
    one row, so tasks that rewrite their history need another trainer.
    """

    def __init__(self, config: Any, llm_client: Any, *_: object, **__: object) -> None:
        self.config, self.rollout = config, config.actor_rollout_ref.rollout
        self.tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
        self.runner = AutoAgentRunner.from_task(config.skyrl_agent.task_yaml, llm_client, self.tokenizer)

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> "SkyAgentLoopManager":
        return cls(*args, **kwargs)

    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """
        Raises:
            ConfigError: a trajectory has several rows.
            BatchFailedError: every trajectory failed.
        """
        val_mode = bool(prompts.meta_info.get("validate", False))
        size = self.rollout.val_kwargs.n if val_mode else self.rollout.n
        rows = await self.runner.rows(rows_of(prompts)[::size], val_mode, num_trajectories=size)
        check_batch(rows.failures, rows.in_baseline)
        if max(rows.episode_nums) > 1:
            raise ConfigError(
                "this task rewrites its history, so that a trajectory has several rows, of which verl takes one: train "
                "it with skyrl-train or tinker"
            )
        return data_proto(rows, self.tokenizer.pad_token_id, self.rollout.prompt_length, self.rollout.response_length)


def data_proto(rows: TrainingRows, pad: int, prompt_length: int, response_length: int) -> DataProto:
    """Prompts padded on the left, responses on the right; the trajectory's reward on the response's last token."""
    prompt_length = max(prompt_length, *map(len, rows.prompt_token_ids))
    response_length = max(response_length, *map(len, rows.response_ids))
    prompts = torch.full((len(rows.rewards), prompt_length), pad)
    responses = torch.full((len(rows.rewards), response_length), pad)
    attention = torch.zeros(len(rows.rewards), prompt_length + response_length, dtype=torch.long)
    response_mask = torch.zeros_like(responses)
    scores, log_probs = (torch.zeros(responses.shape, dtype=torch.float32) for _ in range(2))
    for row, (prompt, response) in enumerate(zip(rows.prompt_token_ids, rows.response_ids, strict=True)):
        prompts[row, prompt_length - len(prompt) :] = torch.tensor(prompt)
        responses[row, : len(response)] = torch.tensor(response)
        attention[row, prompt_length - len(prompt) : prompt_length + len(response)] = 1
        response_mask[row, : len(response)] = torch.tensor(rows.loss_masks[row])
        scores[row, len(response) - 1] = rows.rewards[row]
        if rows.rollout_logprobs is not None:
            log_probs[row, : len(response)] = torch.tensor(rows.rollout_logprobs[row])
    columns = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "rm_scores": scores,
    }
    if rows.rollout_logprobs is not None:
        columns["rollout_log_probs"] = log_probs
    return DataProto(
        batch=TensorDict(columns, batch_size=len(rows.rewards)),
        non_tensor_batch={"finish_reason": np.array(rows.finish_reasons, dtype=object)},
        meta_info={"timing": {}, "metrics": rows.rollout_metrics},
    )
