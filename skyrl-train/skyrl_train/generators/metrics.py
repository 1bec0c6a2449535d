"""What a batch of trajectories tells: lengths, stop reasons, failures, scores. Pure functions; never a nan."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from skyrl_gym.metrics import aggregate_for_environment
from skyrl_train.errors import AllRolloutsFailedError, FailureKind
from skyrl_train.generators.base import Failure, GeneratorOutput, MetricsOutput
from skyrl_train.generators.rewards import total_reward
from skyrl_train.generators.step_wise import rows_of_trajectories

Rewards = Sequence[float] | Sequence[Sequence[float]]


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Rewards,
    env_metrics: Sequence[dict[str, Any] | None] | None = None,
    env_classes: Sequence[str] | None = None,
    *,
    stop_reasons: Sequence[str] | None = None,
    failures: Sequence[Failure | None] | None = None,
    turn_lengths: Sequence[Sequence[int]] | None = None,
) -> dict[str, float]:
    """Numbers about B trajectories, under `generate/` and, where the environments report any, `environment/`. What has
    nothing to be the mean of (tokens of rewarded trajectories where none is) is absent.

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
    rewarded = np.array([total_reward(rewards[i]) != 0.0 for i in kept], dtype=bool)
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
        metrics |= failure_counts(failures)
    if env_metrics is not None and env_classes is not None:
        metrics |= _environment_metrics(env_metrics, env_classes, kept)
    return metrics


def failure_counts(failures: Sequence[Failure | None]) -> dict[str, float]:
    """`generate/num_failed/<kind>` of B trajectories, for every kind there is."""
    counts = Counter(failure.kind for failure in failures if failure is not None)
    return {f"generate/num_failed/{kind}": float(counts[kind]) for kind in get_args(FailureKind)}


def check_not_all_failed(failures: Sequence[Failure | None], what: str) -> None:
    """
    Args:
        failures: of each trajectory.
        what: the batch that they are of, and what it was for.

    Raises:
        AllRolloutsFailedError: none succeeded. The text has the commonest failure.
    """
    failed = [failure for failure in failures if failure is not None]
    if not failed or len(failed) < len(failures):
        return
    [(commonest, count)] = Counter(failed).most_common(1)
    share = "all with this cause" if count == len(failed) else f"{count} of them with this cause"
    raise AllRolloutsFailedError(
        f"all {len(failed)} rollouts of {what}; {share}: {commonest.kind}: {commonest.message}"
    )


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
            if math.isfinite(value):
                found[f"environment/{key}"] = float(value)
    return found


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: list[str]) -> MetricsOutput:
    """The scores of the trajectories, failed ones left out.

    `avg_score` is the mean of the trajectories' rewards (summed over tokens, and over rows where each turn has one of
    its own), `mean_positive_reward` the mean of their positive parts, `pass_at_n` the share of prompts of which a
    sample has a reward above 0. All None if everything failed.

    Args:
        uids: the prompt that each row answers.

    Raises:
        ValueError: no rows, or not one uid for each.
    """
    rewards = generator_output["rewards"]
    if not rewards:
        raise ValueError("there are no trajectories to score: rewards is empty")
    if len(rewards) != len(uids):
        raise ValueError(f"there must be one uid a row; got {len(uids)} uids for {len(rewards)} rows")
    failures = generator_output.get("failures") or [None] * len(rewards)
    scores_by_uid: defaultdict[str, list[float]] = defaultdict(list)
    for rows in rows_of_trajectories(generator_output):
        if all(failures[row] is None for row in rows):
            scores_by_uid[uids[rows.start]].append(sum(total_reward(rewards[row]) for row in rows))
    scores = np.array([score for group in scores_by_uid.values() for score in group])
    solved = np.array([max(group) > 0 for group in scores_by_uid.values()], dtype=float)
    return MetricsOutput(
        avg_score=_mean(scores), pass_at_n=_mean(solved), mean_positive_reward=_mean(np.maximum(scores, 0.0))
    )


def _mean(values: np.ndarray[Any, Any]) -> float | None:
    """The mean; of nothing, None."""
    return float(values.mean()) if values.size else None
