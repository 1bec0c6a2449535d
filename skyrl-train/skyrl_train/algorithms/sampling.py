"""Selection of rollouts for training: uninformative groups, dynamic sampling, overlong responses.

The functions only return groups or rows; `rollouts` and the trainer act on them. A failed rollout has no reward (None,
or a non-finite number) and is ignored.

Shapes: B rollouts, G groups (the rollouts of one prompt).
"""

import math
from collections.abc import Hashable, Sequence

import torch

from skyrl_train.algorithms.advantages import compute_group_numbers

TOLERANCE = 1e-6
"""Largest difference of rewards that count as equal, to absorb rounding."""


def find_informative_groups(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = TOLERANCE
) -> list[Hashable]:
    """Return the groups with different rewards, in order of first appearance.

    A group is informative if its highest and lowest reward differ by more than `tolerance`, or if it has a single
    sample (without comparison). A group in which all rollouts failed is not.

    Args:
        rewards: B numbers, one per rollout (summed over its tokens).
        uids: B names of groups.
    """
    return [uid for uid, is_informative in _map_informative_uids(rewards, uids, tolerance).items() if is_informative]


def find_zero_variance_rows(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float = TOLERANCE
) -> torch.Tensor:
    """Return the rows [B] bool of uninformative groups, which should not train (`zero_variance_filter`)."""
    informative = _map_informative_uids(rewards, uids, tolerance)
    return torch.tensor([not informative[uid] for uid in uids], dtype=torch.bool)


def draw_replacements(
    informative: Sequence[bool], min_replace_ratio: float, generator: torch.Generator
) -> list[int] | None:
    """Replace every uninformative group by a copy of a random informative one, drawn with replacement (dynamic
    sampling, `replace`).

    Args:
        informative: [G], whether each group is.
        generator: source of randomness; the same state gives the same batch.

    Returns:
        [G] the group to use at each position; None if at most `min_replace_ratio` of the groups are informative: the
        batch
            should be sampled again.
    """
    good = [number for number, is_informative in enumerate(informative) if is_informative]
    if len(good) <= min_replace_ratio * len(informative):
        return None
    # All draws at once, from a generator whose state is restored on resume: a resumed run draws the same groups.
    draws = iter(torch.randint(len(good), (len(informative) - len(good),), generator=generator).tolist())
    return [number if is_informative else good[next(draws)] for number, is_informative in enumerate(informative)]


def compute_overlong_penalty(lengths: torch.Tensor, limit: int, buffer_len: int, factor: float) -> torch.Tensor:
    """Compute the soft penalty on long responses (DAPO, https://arxiv.org/abs/2503.14476, eq. 13), to be added to the
    reward:

        0                                        length <= limit - buffer_len
        -factor * (length - (limit - buffer_len)) / buffer_len
        -factor                                  length >= limit

    Args:
        lengths: [B], tokens of the response.
        limit: maximum number of response tokens.
        buffer_len: number of tokens before the limit over which the penalty rises, above 0.

    Returns:
        [B] float32, never above 0.

    Raises:
        ValueError: `buffer_len` is not positive.
    """
    if buffer_len <= 0:
        raise ValueError(f"the overlong penalty needs buffer_len of at least 1 token; got {buffer_len}")
    # float64, so that lengths at the two limits give exactly 0 and exactly -factor.
    excess = (lengths.double() - (limit - buffer_len)) / buffer_len
    return (0.0 - factor * excess.clamp(0.0, 1.0)).float()


def _map_informative_uids(
    rewards: Sequence[float | None], uids: Sequence[Hashable], tolerance: float
) -> dict[Hashable, bool]:
    """Map each group to True if its rewards differ, in order of first appearance."""
    if len(rewards) != len(uids):
        raise ValueError(f"every rollout needs a reward and a uid; got {len(rewards)} rewards and {len(uids)} uids")
    names = list(dict.fromkeys(uids))
    scores_B = torch.tensor([math.nan if reward is None else float(reward) for reward in rewards], dtype=torch.float64)
    counts_B = scores_B.isfinite()
    group_B, scores_B = compute_group_numbers(uids)[counts_B], scores_B[counts_B]
    size_G = torch.bincount(group_B, minlength=len(names))
    nothing_G = torch.zeros(len(names), dtype=torch.float64)
    highest_G = nothing_G.scatter_reduce(0, group_B, scores_B, "amax", include_self=False)
    lowest_G = nothing_G.scatter_reduce(0, group_B, scores_B, "amin", include_self=False)
    return dict(zip(names, ((highest_G - lowest_G > tolerance) | (size_G == 1)).tolist(), strict=True))
