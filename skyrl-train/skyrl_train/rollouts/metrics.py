"""Metrics of rollouts: lengths, stop reasons, failures, scores. Pure functions that never return NaN."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypedDict, get_args

import numpy as np

from skyrl_gym.finite_numbers import to_finite_scalar
from skyrl_gym.metrics import aggregate_for_environment
from skyrl_train.errors import AllRolloutsFailedError, FailureKind
from skyrl_train.rollouts.joining import merge_all_turns
from skyrl_train.rollouts.types import NO_VERSION, Failure, RolloutBatch, Trajectory, TrajectoryGroup

_REPETITION_GRAM = 8
_REPETITION_WINDOW = 512
_REPETITION_MIN_TOKENS = 64
_REPETITION_WEIGHTS = np.power(np.int64(1_000_003), np.arange(_REPETITION_GRAM, dtype=np.int64))


class MetricsOutput(TypedDict):
    """Scores of a batch; None where every trajectory failed."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


def compute_scores(groups: Sequence[TrajectoryGroup]) -> MetricsOutput:
    """Compute the scores of the successful trajectories.

    `avg_score` is the mean of the trajectories' rewards, `mean_positive_reward` the mean of their positive parts,
    `pass_at_n` the fraction of prompts with at least one sample of positive reward. All are None if every trajectory
    failed.

    Raises:
        ValueError: no trajectories.
    """
    if not any(group.trajectories for group in groups):
        raise ValueError("no trajectories to score: rewards is empty")
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


def compute_rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute all metrics of trajectories with turn lengths and environment metrics: `get_rollout_metrics`,
    `generate/num_retries`, `generate/distinct_prompts_share` (of the batch's prompts, those with different tokens), and
    `generate/entropy` if the engine reported log-probs."""
    metrics = get_rollout_metrics(
        *_get_tokens_and_rewards(trajectories),
        [trajectory.env_metrics for trajectory in trajectories],
        [trajectory.env_class for trajectory in trajectories],
        stop_reasons=_stop_reasons(trajectories),
        failures=[trajectory.failure for trajectory in trajectories],
        turn_lengths=[trajectory.turn_lengths for trajectory in trajectories],
    )
    metrics["generate/num_retries"] = float(sum(trajectory.num_retries for trajectory in trajectories))
    prompts = {
        trajectory.id.instance_id: tuple(trajectory.samples[0].prompt_ids)
        for trajectory in trajectories
        if trajectory.samples
    }
    if prompts:
        metrics["generate/distinct_prompts_share"] = len(set(prompts.values())) / len(prompts)
    entropy = estimate_sampling_entropy(trajectories)
    return metrics if entropy is None else metrics | {"generate/entropy": entropy}


def estimate_sampling_entropy(trajectories: Sequence[Trajectory]) -> float | None:
    """Estimate the entropy of sampling in nats per token: the mean of -log p over all generated tokens.

    Masked tokens (e.g. of truncated responses) are included with equal weight, so that runs with different filters and
    losses can be compared; `policy/policy_entropy` is exact, over trained tokens. Failed trajectories are excluded.
    None without generated tokens or log-probs.
    """
    kept = [trajectory for trajectory in trajectories if trajectory.failure is None]
    log_probs = [sample.log_probs for trajectory in kept for sample in trajectory.samples]
    num_generated = sum(sum(trajectory.turn_lengths) for trajectory in kept)
    if not num_generated or any(own is None for own in log_probs):
        return None
    # Tokens of the environment and the chat template have log-prob 0.
    return -math.fsum(value for own in log_probs for value in own or ()) / num_generated


def compute_token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics available for any generator: lengths, stop reasons, failures."""
    return get_rollout_metrics(
        *_get_tokens_and_rewards(trajectories),
        stop_reasons=_stop_reasons(trajectories),
        failures=[trajectory.failure for trajectory in trajectories],
    )


def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Concatenate several batches in order.

    The metrics of `compute_rollout_metrics` (or of `compute_token_metrics` if environments are unknown) are recomputed
    and counts (`generate/num_`) are summed; other metrics are averaged, weighted by the number of trajectories.

    Raises:
        ValueError: no batches.
    """
    if not batches:
        raise ValueError("no generator outputs to concatenate")
    values: defaultdict[str, list[float]] = defaultdict(list)
    weights: defaultdict[str, list[int]] = defaultdict(list)
    for batch in batches:
        num_trajectories = len(batch.trajectories)
        for key, value in batch.metrics.items():
            if value is not None:  # a custom generator may report None for the mean of an empty set
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
    computed = compute_rollout_metrics if all(each.env_class for each in trajectories) else compute_token_metrics
    return RolloutBatch(groups, joined | computed(trajectories))


def compute_version_lag_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """Compute how many versions the weights that sampled the tokens are behind the trained weights: mean and maximum
    over generated tokens of successful trajectories. Empty if no version is known.

    Args:
        weight_version: weight version of the policy that trains on them.
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


def count_failures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count `generate/num_failed/<kind>` for each failure kind."""
    return _count_failures([trajectory.failure for trajectory in trajectories])


def check_not_all_failed(trajectories: Sequence[Trajectory], what: str) -> None:
    """Raise an error if every trajectory of a batch failed.

    Args:
        what: description of the batch and its purpose, for the error.

    Raises:
        AllRolloutsFailedError: every trajectory failed. The message has the most common failure.
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
    """Compute metrics of B trajectories under `generate/` and, if the environments report any, `environment/`. A mean
    over an empty set (e.g. tokens of rewarded trajectories when no trajectory is rewarded) is absent.

    Args:
        responses: B lists of token ids, of whole trajectories.
        rewards: B floats, or B lists of one float per token.
        env_metrics: metrics reported by each environment; None if it reports none. Needs `env_classes`.
        stop_reasons: gives `generate/stop_reason/<reason>`, the fraction of each.
        failures: gives `generate/num_failed/<kind>` and `generate/failed_share`, with several environments also
            `generate/failed_share/<env_class>`; failed trajectories affect no other metric except the fractions.
        turn_lengths: number of generated tokens in each turn; gives `generate/avg_num_turns` and
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
        "generate/repetition": _compute_repetition([responses[i] for i in kept]),
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
        metrics |= _count_failures(failures) | _compute_failed_shares(failed, env_classes)
    if env_metrics is not None and env_classes is not None:
        metrics |= _compute_environment_metrics(env_metrics, env_classes, kept)
    return metrics


def _get_tokens_and_rewards(trajectories: Sequence[Trajectory]) -> tuple[list[list[int]], list[list[float]]]:
    whole = [merge_all_turns(trajectory) for trajectory in trajectories]
    return [sample.response_ids for sample in whole], [sample.rewards for sample in whole]


def _stop_reasons(trajectories: Sequence[Trajectory]) -> list[str] | None:
    """Return the stop reasons; None if the generator reports none."""
    return [reason for each in trajectories if (reason := each.stop_reason) is not None] or None


def _total(reward: float | Sequence[float]) -> float:
    return float(sum(reward)) if isinstance(reward, Sequence) else float(reward)


def _count_failures(failures: Sequence[Failure | None]) -> dict[str, float]:
    counts = Counter(failure.kind for failure in failures if failure is not None)
    return {f"generate/num_failed/{kind}": float(counts[kind]) for kind in get_args(FailureKind)}


def _compute_failed_shares(failed: Sequence[bool], env_classes: Sequence[str] | None) -> dict[str, float]:
    """Compute the fraction of failed trajectories, of all and of each environment if there are several."""
    of_class: defaultdict[str, list[bool]] = defaultdict(list)
    for env_class, is_failed in zip(env_classes or (), failed, strict=False):
        of_class[env_class].append(is_failed)
    shares = {"generate/failed_share": sum(failed) / len(failed)} if failed else {}
    if len(of_class) > 1:
        shares |= {f"generate/failed_share/{name}": sum(own) / len(own) for name, own in sorted(of_class.items())}
    return shares


def _compute_repetition(responses: Sequence[Sequence[int]]) -> float | None:
    """Return the mean fraction of 8-grams among the last 512 tokens of a response that repeat an earlier one of these:
    near 1 in a loop. Responses of fewer than 64 tokens count as 0; None without responses."""
    shares: list[float] = []
    for response in responses:
        tokens = np.asarray(response[-_REPETITION_WINDOW:], dtype=np.int64)
        if len(tokens) < _REPETITION_MIN_TOKENS:
            shares.append(0.0)
            continue
        grams = np.lib.stride_tricks.sliding_window_view(tokens, _REPETITION_GRAM)
        hashes = grams @ _REPETITION_WEIGHTS  # wraps around: equal grams have equal hashes
        shares.append(1 - len(np.unique(hashes)) / len(hashes))
    return _mean(np.array(shares))


def _compute_environment_metrics(
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
    """Return the mean; None for an empty sequence."""
    return float(values.mean()) if values.size else None
