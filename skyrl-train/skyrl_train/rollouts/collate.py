"""Conversion of trajectory groups to the tensors of a training step."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_train.expert_routes import pad_routes
from skyrl_train.kept_tokens import KeptTokens, pad_kept_tokens
from skyrl_train.rollouts.metrics import check_not_all_failed
from skyrl_train.rollouts.padding import convert_prompts_responses_to_batch_tensors, pad_versions
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample
from skyrl_train.training_batch import TrainingInputBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def collate(
    batch: RolloutBatch,
    tokenizer: "PreTrainedTokenizerBase",
    step: int,
    *,
    with_routes: bool = False,
    with_kept_tokens: bool = False,
) -> TrainingInputBatch:
    """Collate trajectories (or their turns) into padded tensors.

    Args:
        step: training step, for error messages.
        with_routes: add the experts selected by the engines as `expert_routes` [B, T, L, k].
        with_kept_tokens: add the tokens kept by truncated sampling as `kept_counts` [B, R] and `kept_ids` [B, M].

    Returns:
        `sequences`, masks, `rewards`, `rollout_logprobs` and `weight_versions` ([B, R] int32, -1 on tokens that the
        model did not generate or with an unknown version); metadata `uids`, `response_length`, `valid` (False for a
        failed rollout). Where a row is a turn: metadata `trajectory_ids`, and the column `is_last_step` [B] bool.

    Raises:
        AllRolloutsFailedError: every rollout failed.
        ValueError: samples with and without log-probs, or step-wise and other trajectories, are mixed; or a trained
            token has no route (`with_routes`) or is not among its kept tokens (`with_kept_tokens`).
    """
    check_not_all_failed(batch.trajectories, f"step {step} failed, so there is nothing to train on")
    rows = list(batch.rows())
    samples = [sample for *_, sample in rows]
    log_probs = [sample.log_probs for sample in samples if sample.log_probs is not None]
    if log_probs and len(log_probs) < len(samples):
        raise ValueError(
            f"{len(log_probs)} of {len(samples)} samples have log-probs; either all samples or none must have them"
        )
    step_wise = {trajectory.is_step_wise for _, trajectory, _ in rows}
    if len(step_wise) > 1:
        raise ValueError("some trajectories of the batch are step-wise and some are not; all must be of the same kind")
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
    if with_routes:
        for group, _, sample in rows:
            _check_routes(sample, group.uid)
        collated["expert_routes"] = pad_routes([sample.routes for sample in samples], attention_mask)
    if with_kept_tokens:
        for group, _, sample in rows:
            _check_kept_tokens(sample, group.uid)
        kept = [sample.kept_tokens for sample in samples]
        collated["kept_counts"], collated["kept_ids"] = pad_kept_tokens(kept, response_mask.shape[1])
    if True in step_wise:
        collated["is_last_step"] = torch.tensor([sample is each.samples[-1] for _, each, sample in rows])
        collated.metadata["trajectory_ids"] = [trajectory.id.to_string() for _, trajectory, _ in rows]
    return collated


def compute_kept_token_metrics(batch: TrainingInputBatch) -> dict[str, float]:
    """Compute mean and maximum of the number of kept tokens over the trained tokens; empty without sampling mask
    replay."""
    if batch.get("kept_counts") is None:
        return {}
    counts = batch.tensor("kept_counts")[batch.tensor("loss_mask") != 0].double()
    if not len(counts):
        return {}
    return {"generate/kept_tokens_mean": counts.mean().item(), "generate/kept_tokens_max": counts.max().item()}


def _check_routes(sample: TrainingSample, uid: str) -> None:
    """Raise ValueError unless each trained token, and all tokens before it, were predicted at a position with a
    route."""
    last = max((index for index, mask in enumerate(sample.loss_mask) if mask), default=None)
    if last is None:
        return
    needed, known = len(sample.prompt_ids) + last, 0 if sample.routes is None else len(sample.routes)
    if known < needed:
        raise ValueError(
            f"trainer.policy.routing_replay=R3: a sample of prompt {uid!r} has expert routes of {known} positions, "
            f"but its last trained token needs {needed}. Check that the generator passes on the engine's "
            "`expert_routes`, or use R2"
        )


def _check_kept_tokens(sample: TrainingSample, uid: str) -> None:
    """Raise ValueError unless each trained token is among its kept tokens. This detects shifted sets and sets of other
    requests, which rarely contain all sampled tokens."""
    setting = f"trainer.policy.sampling_mask_replay=true: a sample of prompt {uid!r}"
    trains = np.asarray(sample.loss_mask) != 0
    if not trains.any():
        return
    kept = sample.kept_tokens or KeptTokens.full_vocabulary(0)
    if len(kept) != len(trains):
        raise ValueError(
            f"{setting} has kept tokens of {len(kept)} of its {len(trains)} response tokens. Check that the generator "
            "passes on the engine's `kept_tokens`"
        )
    unknown = np.flatnonzero(trains & (kept.counts == 0))
    if len(unknown):
        raise ValueError(
            f"{setting} trains token {unknown[0]} of its response, whose kept tokens are unknown. Check that the "
            "generator sets loss mask 0 for tokens that the engine did not sample"
        )
    outside = kept.first_without(sample.response_ids)
    if outside is not None:
        raise ValueError(
            f"{setting} has token {sample.response_ids[outside]} at position {outside} of its response, which is not "
            "among the tokens that it was sampled from: its kept tokens belong to another position or response"
        )
