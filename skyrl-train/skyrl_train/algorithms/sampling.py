"""Which rollouts are worth training on: groups without a difference, dynamic sampling, answers near the length limit.

Decisions only: every function says which rows, the trainer moves them. A rollout that failed has no reward (None, or a
number that is not finite) and is judged as if it had never been sampled.

Shapes: B rollouts, G groups (the rollouts of one prompt).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from skyrl_train.algorithms.advantages import group_numbers

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Selection:
    """Rows to go on with, group after group, in the order in which groups first appear."""

    rows: list[int]
    """Rows of what was judged. A row may be there more than once (`replace_uninformative`)."""

    uids: list[Hashable]
    """The group of each of them from now on. The copy of a group is a group of its own, under the uid whose place it
    takes: so its advantages are those of the original, and there are as many prompts as before."""

    num_groups: int


def informative_groups(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = _TOLERANCE
) -> list[Hashable]:
    """Groups whose rewards differ, so that they teach something, in order of first appearance.

    A group is informative if the population standard deviation of its rewards is above `tolerance`, or if it is a group
    of one (which is compared with nothing). A group in which everything failed is not.

    Args:
        rewards: B numbers, one a rollout (summed over its tokens).
        uids: B names of groups.
    """
    return [uid for uid, is_informative in _judged(rewards, uids, tolerance).items() if is_informative]


def zero_variance_rows(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = _TOLERANCE
) -> torch.Tensor:
    """Rows of groups that are not informative: bool [B], True where a row should not train (`zero_variance_filter`)."""
    judged = _judged(rewards, uids, tolerance)
    return torch.tensor([not judged[uid] for uid in uids], dtype=torch.bool)


def keep_informative(
    rewards: Sequence[float | None],
    uids: Sequence[Hashable],
    max_groups: int | None = None,
    tolerance: float = _TOLERANCE,
) -> Selection:
    """Dynamic sampling by `filter` (DAPO, https://arxiv.org/abs/2503.14476, section 3.2): the rows of informative
    groups, of the first `max_groups` such groups if there are more (null: all).

    Whoever collects over several batches hands in everything collected so far: what was kept once is kept again. A
    prompt that comes twice under one uid is one group.
    """
    return _selection(uids, [(uid, uid) for uid in informative_groups(rewards, uids, tolerance)[:max_groups]])


def replace_uninformative(
    rewards: Sequence[float | None],
    uids: Sequence[Hashable],
    min_replace_ratio: float,
    generator: torch.Generator,
    tolerance: float = _TOLERANCE,
) -> Selection | None:
    """Dynamic sampling by `replace`: every group that is not informative gives its place to a copy of one that is,
    drawn at random (with replacement).

    Args:
        generator: of the draws; nothing else is random, so the same state gives the same batch.

    Returns:
        None if not more than `min_replace_ratio` of the groups are informative: the batch should be sampled anew.
    """
    judged = _judged(rewards, uids, tolerance)
    good = [uid for uid, is_informative in judged.items() if is_informative]
    if len(good) <= min_replace_ratio * len(judged):
        return None
    draws = iter(torch.randint(len(good), (len(judged) - len(good),), generator=generator).tolist())
    return _selection(uids, [(uid, uid if judged[uid] else good[next(draws)]) for uid in judged])


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
    excess = (lengths.double() - (limit - buffer_len)) / buffer_len
    return (0.0 - factor * excess.clamp(0.0, 1.0)).float()


def _judged(rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float) -> dict[Hashable, bool]:
    """Whether each group is informative, in order of first appearance."""
    if len(rewards) != len(uids):
        raise ValueError(f"every rollout needs a reward and a uid; got {len(rewards)} rewards and {len(uids)} uids")
    names = list(dict.fromkeys(uids))
    scores_B = torch.tensor([math.nan if reward is None else float(reward) for reward in rewards], dtype=torch.float64)
    counts_B = scores_B.isfinite()
    group_B, scores_B = group_numbers(uids)[counts_B], scores_B[counts_B]
    size_G = torch.bincount(group_B, minlength=len(names))
    nothing_G = torch.zeros(len(names), dtype=torch.float64)
    mean_G = nothing_G.scatter_add(0, group_B, scores_B) / size_G.clamp(min=1)
    squares_G = nothing_G.scatter_add(0, group_B, (scores_B - mean_G[group_B]).square())
    std_G = (squares_G / size_G.clamp(min=1)).sqrt()
    return dict(zip(names, ((std_G > tolerance) | (size_G == 1)).tolist(), strict=True))


def _selection(uids: Sequence[Hashable], places: Sequence[tuple[Hashable, Hashable]]) -> Selection:
    """The rows that fill `places`: pairs of a uid and of the group whose rows stand under it."""
    rows_of: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        rows_of.setdefault(uid, []).append(row)
    filled = [(row, uid) for uid, source in places for row in rows_of[source]]
    return Selection([row for row, _ in filled], [uid for _, uid in filled], len(places))
