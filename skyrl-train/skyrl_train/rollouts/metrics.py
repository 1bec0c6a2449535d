"""Metrics of rollouts: lengths, stop reasons, failures, scores. Pure functions; never a nan."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypedDict, get_args

import numpy as np

from skyrl_gym.finite_numbers import to_finite_scalar
from skyrl_gym.metrics import aggregate_for_environment
from skyrl_train.errors import AllRolloutsFailedError, FailureKind
from skyrl_train.rollouts.joining import whole_sample
from skyrl_train.rollouts.types import NO_VERSION, Failure, RolloutBatch, Trajectory, TrajectoryGroup


class MetricsOutput(TypedDict):
    """Scores of a batch; None where every trajectory failed."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


def scores_of_groups(groups: Sequence[TrajectoryGroup]) -> MetricsOutput:
    """Compute the scores of the trajectories, failed ones left out.

    `avg_score` is the mean of the trajectories' rewards, `mean_positive_reward` the mean of their positive parts,
    `pass_at_n` the share of prompts of which a sample has a reward above 0. All None if everything failed.

    Raises:
        ValueError: no trajectories.
    """
    if not any(group.trajectories for group in groups):
        raise ValueError("there are no trajectories to score: rewards is empty")
    rewards_of: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.failure is None:
                rewards_of[group.uid].append(trajectory.reward)
    rewards = np.array([reward for own in rewards_of.values() for reward in own])
    solved = np.array([max(own) > 0 for own in rewards_of.values()], dtype=float)
    return MetricsOutput(
        avg_score=_mean(rewards), pass_at_n=_mean(solved), mean_positive_reward=_mean(np.maximum(rewards, 0.0))
    )


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute all metrics of trajectories whose generator knows their turns and their environments' metrics: those of
    `get_rollout_metrics`, `generate/num_retries`, and `generate/entropy` where the engine reported log-probs."""
    metrics = get_rollout_metrics(
        *_tokens_and_rewards(trajectories),
        [trajectory.env_metrics for trajectory in trajectories],
        [trajectory.env_class for trajectory in trajectories],
        stop_reasons=_stop_reasons(trajectories),
        failures=[trajectory.failure for trajectory in trajectories],
        turn_lengths=[trajectory.turn_lengths for trajectory in trajectories],
    )
    metrics["generate/num_retries"] = float(sum(trajectory.num_retries for trajectory in trajectories))
    entropy = sampled_entropy(trajectories)
    return metrics if entropy is None else metrics | {"generate/entropy": entropy}


def sampled_entropy(trajectories: Sequence[Trajectory]) -> float | None:
    """Estimate the entropy of sampling, in nats a token: the mean of -log p over all tokens that the model generated.

    Tokens that do not train count too (of answers that were cut off, say), and all have the same weight, so that runs
    with other filters and losses can be compared; `policy/policy_entropy` is exact, over tokens that train. Failed
    trajectories are left out. None if nothing was generated, or without log-probs.
    """
    kept = [trajectory for trajectory in trajectories if trajectory.failure is None]
    log_probs = [sample.log_probs for trajectory in kept for sample in trajectory.samples]
    num_generated = sum(sum(trajectory.turn_lengths) for trajectory in kept)
    if not num_generated or any(own is None for own in log_probs):
        return None
    # Tokens of the environment and the chat template have log-prob 0.
    return -math.fsum(value for own in log_probs for value in own or ()) / num_generated


def token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics that any generator's trajectories tell: lengths, stop reasons, failures."""
    return get_rollout_metrics(
        *_tokens_and_rewards(trajectories),
        stop_reasons=_stop_reasons(trajectories),
        failures=[trajectory.failure for trajectory in trajectories],
    )


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Return several batches as one, in their order.

    The metrics of `rollout_metrics` (or of `token_metrics`, where trajectories do not know their environments) are
    computed anew and counts (`generate/num_`) are added up; others are averaged with the number of trajectories as
    weight.

    Raises:
        ValueError: no batches.
    """
    if not batches:
        raise ValueError("there are no generator outputs to concatenate")
    values: defaultdict[str, list[float]] = defaultdict(list)
    weights: defaultdict[str, list[int]] = defaultdict(list)
    for batch in batches:
        num_trajectories = len(batch.trajectories)
        for key, value in batch.metrics.items():
            if value is not None:  # a generator of one's own may say so of the mean of nothing
                values[key].append(value)
                weights[key].append(num_trajectories)
    joined = {
        key: float(sum(numbers))
        if key.startswith("generate/num_")
        else float(np.average(numbers, weights=weights[key]))
        for key, numbers in values.items()
    }
    groups = [group for batch in batches for group in batch.groups]
    trajectories = [each for group in groups for each in group.trajectories]
    computed = rollout_metrics if all(each.env_class for each in trajectories) else token_metrics
    return RolloutBatch(groups, joined | computed(trajectories))


def version_lag_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """Compute how many versions the weights that generated tokens are behind those that train on them: mean and maximum
    over the generated tokens of trajectories that did not fail. Nothing where no version is known.

    Args:
        weight_version: of the policy that trains on them.
    """
    lags = [
        weight_version - version
        for trajectory in trajectories
        if trajectory.failure is None
        for sample in trajectory.samples
        for version in sample.weight_versions or []
        if version != NO_VERSION
    ]
    if not lags:
        return {}
    return {
        "generate/weight_version_lag_mean": sum(lags) / len(lags),
        "generate/weight_version_lag_max": float(max(lags)),
    }


def failure_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count `generate/num_failed/<kind>`, for every kind there is."""
    return _failure_counts([trajectory.failure for trajectory in trajectories])


def check_not_all_failed(trajectories: Sequence[Trajectory], what: str) -> None:
    """Refuse a batch of which nothing succeeded.

    Args:
        what: the batch, and what it was for.

    Raises:
        AllRolloutsFailedError: every trajectory failed. The text has the commonest failure.
    """
    failed = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if not failed or len(failed) < len(trajectories):
        return
    [(commonest, count)] = Counter(failed).most_common(1)
    share = "all with this cause" if count == len(failed) else f"{count} of them with this cause"
    raise AllRolloutsFailedError(
        f"all {len(failed)} rollouts of {what}; {share}: {commonest.kind}: {commonest.message}"
    )


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Sequence[float] | Sequence[Sequence[float]],
    env_metrics: Sequence[dict[str, Any] | None] | None = None,
    env_classes: Sequence[str] | None = None,
    *,
    stop_reasons: Sequence[str] | None = None,
    failures: Sequence[Failure | None] | None = None,
    turn_lengths: Sequence[Sequence[int]] | None = None,
) -> dict[str, float]:
    """Compute metrics of B trajectories, under `generate/` and, where the environments report any, `environment/`. A
    metric that has nothing to be the mean of (tokens of rewarded trajectories where none is) is absent.

    Args:
        responses: B lists of token ids, of whole trajectories.
        rewards: B floats, or B lists of one float a token.
        env_metrics: what each environment reports; None for one that reports nothing. Needs `env_classes`.
        stop_reasons: gives `generate/stop_reason/<reason>`, the share of each.
        failures: gives `generate/num_failed/<kind>`; failed trajectories enter no other number but the shares.
        turn_lengths: how many tokens the model wrote in each turn; gives `generate/avg_num_turns` and
            `generate/avg_tokens_per_turn`.
    """
    failed = [failure is not None for failure in failures] if failures is not None else [False] * len(responses)
    kept = [i for i, is_failed in enumerate(failed) if not is_failed]
    lengths = np.array([len(responses[i]) for i in kept], dtype=float)
    rewarded = np.array([_total(rewards[i]) != 0.0 for i in kept], dtype=bool)
    found = {
        "generate/min_num_tokens": float(lengths.min()) if kept else None,
        "generate/max_num_tokens": float(lengths.max()) if kept else None,
        "generate/avg_num_tokens": _mean(lengths),
        "generate/std_num_tokens": float(lengths.std()) if kept else None,
        "generate/avg_tokens_non_zero_rewards": _mean(lengths[rewarded]),
        "generate/avg_tokens_zero_rewards": _mean(lengths[~rewarded]),
    }
    if turn_lengths is not None:
        found["generate/avg_num_turns"] = _mean(np.array([len(turn_lengths[i]) for i in kept], dtype=float))
        lengths_of_turns = [length for i in kept for length in turn_lengths[i]]
        found["generate/avg_tokens_per_turn"] = _mean(np.array(lengths_of_turns, dtype=float))
    metrics = {name: value for name, value in found.items() if value is not None}
    if stop_reasons:
        counts = Counter(stop_reasons)
        for reason in sorted({"stop", "length", *counts}):
            metrics[f"generate/stop_reason/{reason}"] = counts[reason] / len(stop_reasons)
    if failures is not None:
        metrics |= _failure_counts(failures)
    if env_metrics is not None and env_classes is not None:
        metrics |= _environment_metrics(env_metrics, env_classes, kept)
    return metrics


def _tokens_and_rewards(trajectories: Sequence[Trajectory]) -> tuple[list[list[int]], list[list[float]]]:
    whole = [whole_sample(trajectory) for trajectory in trajectories]
    return [sample.response_ids for sample in whole], [sample.rewards for sample in whole]


def _stop_reasons(trajectories: Sequence[Trajectory]) -> list[str] | None:
    """Return the stop reasons; None where the generator tells none."""
    return [reason for each in trajectories if (reason := each.stop_reason) is not None] or None


def _total(reward: float | Sequence[float]) -> float:
    return float(sum(reward)) if isinstance(reward, Sequence) else float(reward)


def _failure_counts(failures: Sequence[Failure | None]) -> dict[str, float]:
    counts = Counter(failure.kind for failure in failures if failure is not None)
    return {f"generate/num_failed/{kind}": float(counts[kind]) for kind in get_args(FailureKind)}


def _environment_metrics(
    env_metrics: Sequence[dict[str, Any] | None], env_classes: Sequence[str], kept: list[int]
) -> dict[str, float]:
    by_class: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for i in kept:
        episode = env_metrics[i]
        if episode:
            by_class[env_classes[i]].append(episode)
    found: dict[str, float] = {}
    for env_class, episodes in by_class.items():
        for key, value in aggregate_for_environment(env_class, episodes).items():
            if (number := to_finite_scalar(value)) is not None:
                found[f"environment/{key}"] = number
    return found


def _mean(values: np.ndarray) -> float | None:
    """Return the mean; None of nothing."""
    return float(values.mean()) if values.size else None
