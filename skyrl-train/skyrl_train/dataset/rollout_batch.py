"""Trajectories as the batch that a training step is made of."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from skyrl_train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.generators.metrics import check_not_all_failed
from skyrl_train.generators.rewards import reward_of_each_token
from skyrl_train.training_batch import TrainingInputBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rollout_batch(
    output: GeneratorOutput, uids: Sequence[str], tokenizer: "PreTrainedTokenizerBase", step: int
) -> TrainingInputBatch:
    """Trajectories (or their turns) as padded tensors.

    Args:
        uids: the prompt of each row.
        step: of the run, for errors.

    Returns:
        `sequences`, masks, `rewards` and `rollout_logprobs`; metadata `uids`, `response_length`, `valid` (False for a
        failed rollout). Where a row is a turn: metadata `trajectory_ids`, and the column `is_last_step` [B] bool.

    Raises:
        AllRolloutsFailedError: every rollout failed.
    """
    failures = output.get("failures") or [None] * len(uids)
    check_not_all_failed(failures, f"step {step} failed, so there is nothing to learn from")
    sequences, attention_mask, response_mask, rewards, loss_mask, log_probs = (
        convert_prompts_responses_to_batch_tensors(
            tokenizer,
            output["prompt_token_ids"],
            output["response_ids"],
            [
                reward_of_each_token(reward, len(response))
                for reward, response in zip(output["rewards"], output["response_ids"], strict=True)
            ],
            output["loss_masks"],
            output["rollout_logprobs"],
        )
    )
    batch = TrainingInputBatch(
        sequences=sequences,
        attention_mask=attention_mask,
        response_mask=response_mask,
        rewards=rewards,
        loss_mask=loss_mask,
        rollout_logprobs=log_probs,
        metadata={
            "uids": list(uids),
            "response_length": response_mask.shape[1],
            "valid": [failure is None for failure in failures],
        },
    )
    last_steps, trajectory_ids = output.get("is_last_step"), output.get("trajectory_ids")
    if last_steps is not None and trajectory_ids is not None:
        batch["is_last_step"] = torch.tensor(last_steps)
        batch.metadata["trajectory_ids"] = [trajectory_id.to_string() for trajectory_id in trajectory_ids]
    return batch
