"""Selection of rollouts for training: groups without a difference, dynamic sampling, answers near the length limit.

Decisions only: the functions return which groups or rows, `rollouts` and the trainer act on it. A rollout that failed
has no reward (None, or a number that is not finite) and is treated as if it had never been sampled.

Shapes: B rollouts, G groups (the rollouts of one prompt).
"""

import math
from collections.abc import Hashable, Sequence

import torch

from skyrl_train.algorithms.advantages import group_numbers

TOLERANCE = 1e-6
"""Difference of rewards that are the same but for rounding."""


def informative_groups(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = TOLERANCE
) -> list[Hashable]:
    """Return the groups whose rewards differ, in order of first appearance.

    A group is informative if its highest and lowest reward differ by more than `tolerance`, or if it is a group of one
    (which is compared with nothing). A group in which everything failed is not.

    Args:
        rewards: B numbers, one a rollout (summed over its tokens).
        uids: B names of groups.
    """
    return [uid for uid, is_informative in _informative_by_uid(rewards, uids, tolerance).items() if is_informative]


def zero_variance_rows(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = TOLERANCE
) -> torch.Tensor:
    """Return the rows [B] bool of groups that are not informative and should not train (`zero_variance_filter`)."""
    informative = _informative_by_uid(rewards, uids, tolerance)
    return torch.tensor([not informative[uid] for uid in uids], dtype=torch.bool)


def draw_replacements(
    informative: Sequence[bool], min_replace_ratio: float, generator: torch.Generator
) -> list[int] | None:
    """Dynamic sampling by `replace`: every group that is not informative gives its place to a copy of one that is,
    drawn at random (with replacement).

    Args:
        informative: [G], whether each group is.
        generator: of the draws; nothing else is random, so the same state gives the same batch.

    Returns:
        [G] the group that fills each place; None if not more than `min_replace_ratio` of the groups are informative:
        the batch should be sampled anew.
    """
    good = [number for number, is_informative in enumerate(informative) if is_informative]
    if len(good) <= min_replace_ratio * len(informative):
        return None
    # All draws at once, from a generator that a resumed run has in the same state: it fills the same places.
    draws = iter(torch.randint(len(good), (len(informative) - len(good),), generator=generator).tolist())
    return [number if is_informative else good[next(draws)] for number, is_informative in enumerate(informative)]


def overlong_penalty(lengths: torch.Tensor, limit: int, buffer_len: int, factor: float) -> torch.Tensor:
    """Soft penalty on long answers (DAPO, https://arxiv.org/abs/2503.14476, eq. 13), to be added to the reward:

        0                                        length <= limit - buffer_len
        -factor * (length - (limit - buffer_len)) / buffer_len
        -factor                                  length >= limit

    Args:
        lengths: [B], tokens of the answer.
        limit: the most tokens an answer may have; buffer_len: over how many before it the penalty rises, above 0.

    Returns:
        [B] float32, never above 0.

    Raises:
        ValueError: `buffer_len` is not positive.
    """
    if buffer_len <= 0:
        raise ValueError(f"the buffer of the overlong penalty must have at least one token; got {buffer_len}")
    # float64, so that lengths at the two limits give exactly 0 and exactly -factor.
    excess = (lengths.double() - (limit - buffer_len)) / buffer_len
    return (0.0 - factor * excess.clamp(0.0, 1.0)).float()


def _informative_by_uid(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float
) -> dict[Hashable, bool]:
    """Map each group to True if its rewards differ, in order of first appearance."""
    if len(rewards) != len(uids):
        raise ValueError(f"every rollout needs a reward and a uid; got {len(rewards)} rewards and {len(uids)} uids")
    names = list(dict.fromkeys(uids))
    scores_B = torch.tensor([math.nan if reward is None else float(reward) for reward in rewards], dtype=torch.float64)
    counts_B = scores_B.isfinite()
    group_B, scores_B = group_numbers(uids)[counts_B], scores_B[counts_B]
    size_G = torch.bincount(group_B, minlength=len(names))
    nothing_G = torch.zeros(len(names), dtype=torch.float64)
    highest_G = nothing_G.scatter_reduce(0, group_B, scores_B, "amax", include_self=False)
    lowest_G = nothing_G.scatter_reduce(0, group_B, scores_B, "amin", include_self=False)
    return dict(zip(names, ((highest_G - lowest_G > tolerance) | (size_G == 1)).tolist(), strict=True))
