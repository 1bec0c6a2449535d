"""Preparation of a step's batch for the loss: reward penalties, masks, off-policy correction, advantages, loss weights.

Pure functions from a batch to a new batch with further columns, and metrics; no model forward. The order in
`prepare_training_batch` matters: rewards must be final before they are compared, and the loss mask before advantages
are normalized over it.

A failed rollout (metadata `valid`) has loss mask 0 and is excluded from baselines. In a batch whose rows are turns
(metadata `trajectory_ids`) advantages are estimated by trajectory.

Shapes: B rows, R response tokens; with rows that are turns: M trajectories, K the maximum number of turns.
"""

from collections.abc import Hashable, Sequence

import torch

from skyrl_train.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    compute_group_numbers,
    compute_turn_numbers,
    count_negative_groups,
    normalize_advantages,
)
from skyrl_train.algorithms.credit import build_trajectory_matrix, compute_step_numbers, gather_rows
from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.off_policy import correct_off_policy, mismatch_metrics
from skyrl_train.algorithms.reduction import LossReduction, masked_mean, token_weights
from skyrl_train.algorithms.sampling import compute_overlong_penalty, find_zero_variance_rows
from skyrl_train.config import AlgorithmConfig, GeneratorConfig, SkyRLConfig
from skyrl_train.errors import ConfigError, RolloutGapError
from skyrl_train.training_batch import TrainingInputBatch, shape_of

Metrics = dict[str, float]
PreparedBatch = tuple[TrainingInputBatch, Metrics]


def prepare_training_batch(batch: TrainingInputBatch, cfg: SkyRLConfig, kl_coefficient: float) -> PreparedBatch:
    """Compute `advantages` and `returns` after penalties and filters on rewards and loss mask. Returns batch and
    metrics.

    Args:
        batch: `rewards`, masks, and as required by the settings `action_log_probs`, `base_action_log_probs`, `values`,
            `rollout_logprobs`.
        kl_coefficient: coefficient of the KL controller, for `use_kl_in_reward`.
    """
    algorithm = cfg.trainer.algorithm
    metrics: Metrics = {}
    # Turns are numbered before any token is removed from the loss mask.
    batch = _set_columns(batch, turns=compute_turn_numbers(batch.tensor("loss_mask")))
    batch, own = penalize_overlong(batch, algorithm, cfg.generator)
    metrics |= own
    scores = trajectory_scores(batch)  # without the KL penalty, which would make every group appear informative
    batch, own = subtract_kl(batch, algorithm, kl_coefficient)
    metrics |= own
    batch, own = mask_uninformative_groups(batch, algorithm, scores)
    metrics |= own
    batch, own = correct_for_rollout_policy(batch, algorithm)
    metrics |= own
    batch, own = add_advantages(batch, algorithm)
    return batch, metrics | own


def penalize_overlong(
    batch: TrainingInputBatch, algorithm: AlgorithmConfig, generator: GeneratorConfig
) -> PreparedBatch:
    """Add DAPO's soft penalty of long responses (`overlong_buffer`) to the reward of the last token.

    The length counts the whole response including observations; the limit of a multi-turn response is the maximum
    tokens of one completion. If every turn is a row, each turn is penalized by its length. With
    `overlong_buffer.counts=context` the row's prompt counts as well, and the limit is the maximum context length.
    """
    buffer = algorithm.overlong_buffer
    if buffer.len is None:
        return batch, {}
    length_B = _get_response_mask(batch).sum(dim=-1)
    counts_context = buffer.counts == "context"
    counted_B = (batch.tensor("attention_mask") != 0).sum(dim=-1) if counts_context else length_B
    limit = generator.longest_context if counts_context else generator.sampling_params.max_generate_length
    penalty_B = compute_overlong_penalty(counted_B, limit, buffer.len, buffer.penalty_factor)
    rewards = batch.tensor("rewards").clone()
    rewards[torch.arange(len(batch)), length_B.clamp(min=1) - 1] += penalty_B
    valid_B = _get_valid(batch)
    return _set_columns(batch, rewards=rewards), {
        "loss/avg_overlong_penalty": _mean(penalty_B[valid_B]),
        "loss/overlong_share": _mean((penalty_B[valid_B] < 0).float()),
    }


def subtract_kl(batch: TrainingInputBatch, algorithm: AlgorithmConfig, coefficient: float) -> PreparedBatch:
    """Subtract coefficient * KL(policy || reference) from the reward of every unmasked token (`use_kl_in_reward`). A
    negative coefficient, which a controller can reach, counts as 0. `loss/avg_kl` averages the KL over the unmasked
    tokens of each sequence, then over sequences with unmasked tokens."""
    if not algorithm.use_kl_in_reward:
        return batch, {}
    mask = batch.tensor("loss_mask")
    kl = compute_approx_kl(
        batch.tensor("action_log_probs"), batch.tensor("base_action_log_probs"), mask, algorithm.kl_estimator_type
    )
    coefficient = max(0.0, coefficient)
    trains_B = (mask != 0).any(dim=-1)
    return _set_columns(batch, rewards=batch.tensor("rewards") - kl * coefficient), {
        "loss/avg_kl": _mean(masked_mean(kl, mask, dim=-1)[trains_B]),
        "loss/avg_kl_max": _mean(kl.abs().amax(dim=-1)[trains_B]),
        "loss/kl_loss_coef": coefficient,
    }


def trajectory_scores(batch: TrainingInputBatch) -> list[float | None]:
    """Return for each row the summed reward of its trajectory; None for a failed trajectory."""
    trajectory_B = compute_group_numbers(_get_trajectory_ids(batch))
    row_scores_B = torch.where(_get_response_mask(batch), batch.tensor("rewards"), 0.0).sum(dim=-1, dtype=torch.float64)
    scores_M = torch.zeros(int(trajectory_B.max()) + 1, dtype=torch.float64).index_add_(0, trajectory_B, row_scores_B)
    scores_B = scores_M[trajectory_B].tolist()
    return [score if is_valid else None for score, is_valid in zip(scores_B, batch.metadata["valid"], strict=True)]


def mask_uninformative_groups(
    batch: TrainingInputBatch, algorithm: AlgorithmConfig, scores: Sequence[float | None]
) -> PreparedBatch:
    """Mask rows without a baseline: with `zero_variance_filter`, prompts whose responses all have the same score; with
    a group-based estimator, always the only successful sample of a group.

    Args:
        scores: trajectory score of each row; None for a failed trajectory.
    """
    uids = batch.metadata["uids"]
    masked_B = torch.zeros(len(batch), dtype=torch.bool)
    metrics: Metrics = {}
    if AdvantageEstimatorRegistry.get_requirements(algorithm.advantage_estimator).groups:
        masked_B |= _find_lone_rows(batch)
        metrics["loss/num_lone_samples"] = float(len(_get_prompts(uids, masked_B)))
    zero_variance_B = find_zero_variance_rows(
        _filter_first_rows(batch, scores), uids, algorithm.zero_variance_filter_tol
    )
    metrics["loss/zero_variance_share"] = len(_get_prompts(uids, zero_variance_B)) / len(set(uids))
    if algorithm.zero_variance_filter:
        masked_B |= zero_variance_B
    return _set_columns(batch, loss_mask=_find_masked_rows(batch.tensor("loss_mask"), masked_B)), metrics


def correct_for_rollout_policy(batch: TrainingInputBatch, algorithm: AlgorithmConfig) -> PreparedBatch:
    """Measure the mismatch between engine and trainer and, with `off_policy_correction`, add `off_policy_weights` and
    reduce the loss mask. Batches without the trainer's log-probs: see `rollout_mismatch_metrics`."""
    metrics = rollout_mismatch_metrics(batch, algorithm.max_rollout_gap)
    if not algorithm.off_policy_correction.is_on:
        return batch, metrics
    correction = correct_off_policy(
        batch.tensor("action_log_probs"),
        batch.tensor("rollout_logprobs"),
        batch.tensor("loss_mask"),
        algorithm.off_policy_correction,
    )
    corrected = _set_columns(batch, loss_mask=correction.loss_mask, off_policy_weights=correction.weights)
    return corrected, metrics | correction.metrics


def rollout_mismatch_metrics(batch: TrainingInputBatch, max_gap: float | None) -> Metrics:
    """Compute metrics of the distance between engine and trainer, if the batch has both log-probs.

    Args:
        max_gap: `trainer.algorithm.max_rollout_gap`.

    Raises:
        RolloutGapError: the mean distance is above `max_gap`.
    """
    if batch.get("rollout_logprobs") is None or batch.get("action_log_probs") is None:
        return {}
    metrics = mismatch_metrics(
        batch.tensor("action_log_probs"), batch.tensor("rollout_logprobs"), batch.tensor("loss_mask")
    )
    gap = metrics.get("policy/rollout_train_logprobs_abs_diff_mean", 0.0)
    if max_gap is not None and gap > max_gap:
        raise RolloutGapError(
            f"log-probs of the engine and the trainer differ by {gap:.3g} nats on average over the tokens of this "
            f"step, more than trainer.algorithm.max_rollout_gap={max_gap:g}; staleness does not explain a gap of this "
            "size. Check that engines and trainer use the same sampling settings, weights, tokenizer and model; "
            "python -m skyrl_train.entrypoints.main_mismatch measures it"
        )
    return metrics


def add_advantages(batch: TrainingInputBatch, algorithm: AlgorithmConfig) -> PreparedBatch:
    """Add `advantages` and `returns` [B, R] by the configured estimator; 0 in failed rollouts, which are excluded from
    the estimate. With `advantage_batch_normalize`, advantages are then normalized over the loss mask."""
    valid_B = _get_valid(batch)
    survivors = batch.rows(valid_B)
    names = [name for name, is_valid in zip(_get_trajectory_ids(batch), valid_B.tolist(), strict=True) if is_valid]
    uids = [uid for uid, is_valid in zip(batch.metadata["uids"], valid_B.tolist(), strict=True) if is_valid]
    requires = AdvantageEstimatorRegistry.get_requirements(algorithm.advantage_estimator)
    if "trajectory_ids" in batch.metadata and not requires.single_tokens:
        values = _estimate_by_trajectory(survivors, algorithm, names, uids)
    else:
        values = _estimate_by_token(survivors, algorithm, uids)
    mask, rewards = batch.tensor("loss_mask"), batch.tensor("rewards")
    advantages, returns = (torch.zeros_like(rewards).index_put_((valid_B,), value.to(rewards)) for value in values)
    if algorithm.advantage_batch_normalize:
        advantages = normalize_advantages(advantages, mask)
    scores = [score for score in _filter_first_rows(batch, trajectory_scores(batch)) if score is not None]
    metrics = {
        "loss/avg_final_rewards": sum(scores) / max(1, len(scores)),
        "loss/avg_raw_advantages": masked_mean(advantages, mask).item(),
        "loss/avg_raw_advantages_abs": masked_mean(advantages.abs(), mask).item(),
        "loss/share_of_rows_trained": _mean((mask != 0).any(dim=-1).float()),
    }
    if requires.nonnegative_scores:
        metrics[negative_groups_metric(algorithm)] = float(
            count_negative_groups(survivors.tensor("rewards"), survivors.tensor("response_mask"), uids)
        )
    return _set_columns(batch, advantages=advantages, returns=returns), metrics


def negative_groups_metric(algorithm: AlgorithmConfig) -> str:
    """Return the name of the metric that counts groups with a negative mean score."""
    return f"loss/{algorithm.advantage_estimator}_negative_groups"


def mini_batches_of_prompts(uids: Sequence[Hashable], prompts_each: int) -> list[list[int]]:
    """Divide rows into mini-batches of `prompts_each` prompts, in order of first appearance. The number of mini-batches
    depends only on the number of prompts, not on the rows per prompt."""
    rows_of: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        rows_of.setdefault(uid, []).append(row)
    groups = list(rows_of.values())
    return [
        [row for group in groups[start : start + prompts_each] for row in group]
        for start in range(0, len(groups), prompts_each)
    ]


def loss_weights(
    batch: TrainingInputBatch,
    mini_batches: Sequence[Sequence[int]],
    reduction: LossReduction,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """Compute the loss weight of every token [B, R] by the reduction within each mini-batch: the loss of an optimizer
    step is a weighted sum, independent of the division over ranks. Rows of one trajectory count as one sequence."""
    mask, uids, names = batch.tensor("loss_mask"), batch.metadata["uids"], batch.metadata.get("trajectory_ids")
    weights = torch.zeros_like(mask)
    for rows in mini_batches:
        own = torch.tensor(rows)
        sequences = None if names is None else [names[row] for row in rows]
        weights[own] = token_weights(mask[own], reduction, max_seq_len, [uids[row] for row in rows], sequences)
    return weights


# ---- the estimator's two views of a batch


def _estimate_by_token(
    survivors: TrainingInputBatch, algorithm: AlgorithmConfig, uids: Sequence[Hashable]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate advantages and returns [B, R] of rows that are whole trajectories."""
    return _estimate(
        algorithm,
        rewards=survivors.tensor("rewards"),
        response_mask=survivors.tensor("response_mask"),
        action_mask=survivors.tensor("loss_mask"),
        turns=survivors.tensor("turns"),
        index=uids,
        values=survivors.get("values"),
    )


def _estimate_by_trajectory(
    survivors: TrainingInputBatch, algorithm: AlgorithmConfig, names: Sequence[str], uids: Sequence[Hashable]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate advantages and returns [B, R] of rows that are turns. The estimator receives a matrix of trajectories
    with one token per turn; every token of a turn's response gets the turn's value."""
    response_mask = survivors.tensor("response_mask") != 0
    trajectory_B, step_B = compute_step_numbers(names)
    rewards_B = torch.where(response_mask, survivors.tensor("rewards"), 0.0).sum(dim=-1)
    rewards_MK, mask_MK = build_trajectory_matrix(rewards_B, trajectory_B, step_B)
    uid_of = dict(zip(names, uids, strict=True))
    estimates_MK = _estimate(
        algorithm,
        rewards=rewards_MK,
        response_mask=mask_MK,
        action_mask=mask_MK,
        turns=torch.arange(mask_MK.shape[1]).expand(mask_MK.shape),
        index=list(uid_of.values()),
        values=None,
    )
    advantages, returns = (
        torch.where(response_mask, gather_rows(values_MK, trajectory_B, step_B)[:, None], 0.0)
        for values_MK in estimates_MK
    )
    return advantages, returns


def _estimate(
    algorithm: AlgorithmConfig,
    *,
    rewards: torch.Tensor,
    response_mask: torch.Tensor,
    action_mask: torch.Tensor,
    turns: torch.Tensor,
    index: Sequence[Hashable],
    values: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not len(rewards):
        return rewards, rewards
    returned = AdvantageEstimatorRegistry.get(algorithm.advantage_estimator)(
        token_level_rewards=rewards,
        response_mask=response_mask,
        action_mask=action_mask,
        turns=turns,
        index=index,
        values=values,
        config=algorithm,
        grpo_norm_by_std=algorithm.grpo_norm_by_std,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
    )
    match returned:
        case (torch.Tensor() as advantages, torch.Tensor() as returns):
            if advantages.shape == returns.shape == rewards.shape:
                return advantages, returns
    raise ConfigError(
        f"trainer.algorithm.advantage_estimator='{algorithm.advantage_estimator}' must return advantages and returns, "
        f"two tensors {tuple(rewards.shape)}; got {shape_of(returned)}"
    )


# ---- rows, trajectories, prompts


def _set_columns(batch: TrainingInputBatch, **columns: torch.Tensor | None) -> TrainingInputBatch:
    return TrainingInputBatch({**batch, **columns}, metadata=dict(batch.metadata))


def _get_valid(batch: TrainingInputBatch) -> torch.Tensor:
    return torch.tensor(batch.metadata["valid"], dtype=torch.bool)


def _get_response_mask(batch: TrainingInputBatch) -> torch.Tensor:
    return batch.tensor("response_mask") != 0


def _get_trajectory_ids(batch: TrainingInputBatch) -> Sequence[str]:
    """Return the id of each row's trajectory."""
    return batch.metadata.get("trajectory_ids") or [str(row) for row in range(len(batch))]


def _filter_first_rows(batch: TrainingInputBatch, values: Sequence[float | None]) -> list[float | None]:
    """Keep a trajectory's value in its first row and replace it by None in the others, so that each trajectory counts
    once."""
    seen: set[str] = set()
    first_only: list[float | None] = []
    for name, value in zip(_get_trajectory_ids(batch), values, strict=True):
        first_only.append(None if name in seen else value)
        seen.add(name)
    return first_only


def _find_lone_rows(batch: TrainingInputBatch) -> torch.Tensor:
    """Return rows [B] bool of trajectories that are the only successful ones of their prompt."""
    trajectories, uids, valid = _get_trajectory_ids(batch), batch.metadata["uids"], batch.metadata["valid"]
    survivors: dict[Hashable, set[str]] = {}
    for uid, name, is_valid in zip(uids, trajectories, valid, strict=True):
        if is_valid:
            survivors.setdefault(uid, set()).add(name)
    return torch.tensor(
        [is_valid and len(survivors[uid]) == 1 for uid, is_valid in zip(uids, valid, strict=True)], dtype=torch.bool
    )


def _find_masked_rows(mask: torch.Tensor, masked_B: torch.Tensor) -> torch.Tensor:
    return torch.where(masked_B[:, None], torch.zeros_like(mask), mask)


def _get_prompts(uids: Sequence[Hashable], rows_B: torch.Tensor) -> set[Hashable]:
    return {uid for uid, is_in in zip(uids, rows_B.tolist(), strict=True) if is_in}


def _mean(values: torch.Tensor) -> float:
    return values.mean(dtype=torch.float64).item() if values.numel() else 0.0
