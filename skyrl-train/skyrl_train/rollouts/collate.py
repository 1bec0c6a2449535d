"""Trajectory groups to the tensors of a training step."""

from typing import TYPE_CHECKING

import torch

from skyrl_train.rollouts.metrics import check_not_all_failed
from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors, pad_versions
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train.training_batch import TrainingInputBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def collate(batch: RolloutBatch, tokenizer: "PreTrainedTokenizerBase", step: int) -> TrainingInputBatch:
    """Return trajectories (or their turns) as padded tensors.

    Args:
        step: of the run, for errors.

    Returns:
        `sequences`, masks, `rewards`, `rollout_logprobs` and `weight_versions` ([B, R] int32, -1 on tokens that the
        model did not generate or whose version is not known); metadata `uids`, `response_length`, `valid` (False for a
        failed rollout). Where a row is a turn: metadata `trajectory_ids`, and the column `is_last_step` [B] bool.

    Raises:
        AllRolloutsFailedError: every rollout failed.
        ValueError: some samples have log-probs and some have none, or some trajectories are step-wise and some not.
    """
    check_not_all_failed(batch.trajectories, f"step {step} failed, so there is nothing to learn from")
    rows = list(batch.rows())
    samples = [sample for *_, sample in rows]
    log_probs = [sample.log_probs for sample in samples if sample.log_probs is not None]
    if log_probs and len(log_probs) < len(samples):
        raise ValueError(f"{len(log_probs)} of {len(samples)} samples have log-probs; it must be all of them or none")
    step_wise = {trajectory.is_step_wise for _, trajectory, _ in rows}
    if len(step_wise) > 1:
        raise ValueError("some trajectories of the batch are step-wise and some are not; they must be of one kind")
    sequences, attention_mask, response_mask, rewards, loss_mask, rollout_logprobs = (
        convert_prompts_responses_to_batch_tensors(
            tokenizer,
            [sample.prompt_ids for sample in samples],
            [sample.response_ids for sample in samples],
            [sample.rewards for sample in samples],
            [sample.loss_mask for sample in samples],
            log_probs or None,
        )
    )
    collated = TrainingInputBatch(
        sequences=sequences,
        attention_mask=attention_mask,
        response_mask=response_mask,
        rewards=rewards,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        weight_versions=pad_versions([sample.weight_versions for sample in samples], response_mask),
        metadata={
            "uids": [group.uid for group, *_ in rows],
            "response_length": response_mask.shape[1],
            "valid": [trajectory.failure is None for _, trajectory, _ in rows],
        },
    )
    if True in step_wise:
        collated["is_last_step"] = torch.tensor([sample is each.samples[-1] for _, each, sample in rows])
        collated.metadata["trajectory_ids"] = [trajectory.id.to_string() for _, trajectory, _ in rows]
    return collated
