"""Advantage estimators: from rewards to how much better each token was than expected.

An estimator sees only rollouts that ended as they should: a failed one is taken out before, so that no estimator has to
know of failures and none can let one into a baseline. Two masks are two things: the response mask is 1 on what the
model and the environment wrote, the action mask on what the model wrote (and is trained on). What stands outside the
response mask may be anything, NaN included. Sums run in float64, so rows and tokens may come in any order, and scores
that are equal have a variance of exactly 0.

Shapes: B sequences, T response tokens, G groups (the samples of one prompt), K turns.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from skyrl_train.config.requirements import (
    AdvantageEstimatorRegistry,
    EstimatorRequirements,
    register_advantage_estimator,
)

AdvantageEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Called with keywords alone: `token_level_rewards` [B, T], `response_mask` [B, T], `action_mask` [B, T], `index` (B
group names), `turns` [B, T] int64 (the number of the turn a token belongs to), `values` [B, T] or None, `config`
(AlgorithmConfig), `grpo_norm_by_std`, `gamma`, `lambd`; takes what it needs, and `**_`. Returns advantages and returns,
both [B, T]."""

__all__ = [
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "EstimatorRequirements",
    "group_means",
    "group_numbers",
    "negative_groups",
    "normalize_advantages",
    "register_advantage_estimator",
    "turn_numbers",
]

_GROUPS = EstimatorRequirements(critic=False, groups=True)

_EPSILON = 1e-6
_ROWS = 128
_LARGEST_EXPONENT = 500.0
_SMALLEST_DISCOUNT = 1e-12  # what 0 is taken for: the recursion divides by it


# ---- one advantage a sequence, from its group


@register_advantage_estimator("grpo", requires=_GROUPS)
def grpo_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    grpo_norm_by_std: bool = True,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (GRPO, https://arxiv.org/abs/2402.03300, section 4.1):

        score_b = sum_t reward_bt
        A_bt    = (score_b - mean of the group) / (std of the group + 1e-6)

    with the sample standard deviation (divisor n - 1). A group of one has no baseline: mean 0, std 1.
    Without `grpo_norm_by_std` there is no division (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _scores_and_groups(token_level_rewards, response_mask, index)
    mean_G, size_G = group_means(scores_B, group_B, counts_B)
    alone_B = size_G[group_B] == 1
    centred_B = scores_B - torch.where(alone_B, 0.0, mean_G[group_B])
    if grpo_norm_by_std:
        std_G = _group_stds(centred_B, group_B, counts_B, size_G)
        centred_B = centred_B / (torch.where(alone_B, 1.0, std_G[group_B]) + _EPSILON)
    return _of_every_token(centred_B, response_mask, token_level_rewards)


@register_advantage_estimator("rloo", requires=_GROUPS)
def rloo_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with the mean of the *other* samples of the prompt as baseline (RLOO, https://arxiv.org/abs/2402.14740,
    section 2.2):

        A_b = score_b - (sum of the group's scores - score_b) / (n - 1)  =  n / (n - 1) * (score_b - mean of the group)

    The baseline of a sample does not depend on the sample, so the gradient is unbiased. A group of one has no others:
    its advantage is 0, and it teaches nothing.

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _scores_and_groups(token_level_rewards, response_mask, index)
    mean_G, size_G = group_means(scores_B, group_B, counts_B)
    scale_G = size_G / (size_G - 1).clamp(min=1)
    return _of_every_token((scores_B - mean_G[group_B]) * scale_G[group_B], response_mask, token_level_rewards)


@register_advantage_estimator(
    "maxrl", requires=EstimatorRequirements(critic=False, groups=True, nonnegative_scores=True)
)
def maxrl_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum-likelihood reinforcement learning (MaxRL, https://arxiv.org/abs/2602.02710): scores are successes, and
    the log of the chance of success is what rises, so that rare successes weigh more:

        A_b = (score_b - mean of the group) / mean of the group         0 in a group whose mean is 0

    The formula means something for scores of 0 and above alone. A group with a negative mean gets 0 (with the division
    its signs would be turned round); `negative_groups` counts them. In a group of one, the mean is the score: 0.

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _scores_and_groups(token_level_rewards, response_mask, index)
    mean_G = group_means(scores_B, group_B, counts_B)[0]
    mean_B = mean_G[group_B]
    divisor_B = torch.where(mean_B > 0, mean_B, 1.0)
    values_B = torch.where(mean_B > 0, (scores_B - mean_B) / divisor_B, 0.0)
    return _of_every_token(values_B, response_mask, token_level_rewards)


def negative_groups(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable]) -> int:
    """Count the groups with a mean score below 0, for which `maxrl` is not defined."""
    scores_B, group_B, counts_B = _scores_and_groups(token_level_rewards, response_mask, index)
    return int((group_means(scores_B, group_B, counts_B)[0] < 0).sum())


@register_advantage_estimator("reinforce++_baseline", requires=_GROUPS)
def reinforce_baseline_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    action_mask: torch.Tensor,
    index: Sequence[Hashable],
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with baseline (https://arxiv.org/abs/2501.03262): the group's mean is taken off, and the batch as a
    whole gives the scale, so that a group of nearly equal scores is not blown up as by GRPO:

        A'_bt = score_b - mean of the group                 at every action token
        A_bt  = (A'_bt - mean of A') / std of A'            over the action tokens of the whole batch

    The paper normalises over all token advantages of the global batch, hence a long answer weighs more in mean and std;
    so does this. With groups of equal size, the leave-one-out baseline gives the same: its factor n / (n - 1) cancels.
    The paper's KL penalty is a setting of its own here (`use_kl_loss`, or `use_kl_in_reward`). A group of one is its
    own baseline: A' is 0.

    Returns:
        advantages, [B, T], 0 outside `action_mask`, and A' as returns.
    """
    scores_B, group_B, counts_B = _scores_and_groups(token_level_rewards, response_mask, index)
    mean_G = group_means(scores_B, group_B, counts_B)[0]
    centred = _of_every_token(scores_B - mean_G[group_B], action_mask, token_level_rewards)[0]
    return normalize_advantages(centred, action_mask), centred


# ---- credit over turns and tokens


def turn_numbers(action_mask: torch.Tensor) -> torch.Tensor:
    """The number of the turn that each column belongs to, from 0: int64 [B, T].

    A turn begins where a run of 1s of the action mask begins, and lasts until the next does: what the environment
    answers belongs to the turn it answers. Columns before the first run are turn 0.
    """
    is_action = action_mask != 0
    begins = is_action.float()
    begins[:, 1:] *= ~is_action[:, :-1]
    return (begins.cumsum(dim=1).long() - 1).clamp_(min=0)


@register_advantage_estimator("turn_grpo", requires=replace(_GROUPS, single_turns=True))
def turn_grpo_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    turns: torch.Tensor,
    index: Sequence[Hashable],
    grpo_norm_by_std: bool = True,
    gamma: float = 1.0,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO turn by turn: a turn is compared with the turn of the same number in the other samples of the prompt, by
    what came from there on. r_bk is the sum of the rewards on the tokens of turn k:

        G_bk = sum_(j >= k) gamma^(j - k) r_bj
        A_bt = (G_bk - mean_k) / (std_k + 1e-6)             k the turn of token t

    Mean and (sample) standard deviation are over the samples of the group that have a turn k. A turn that no other
    sample of the group has is compared with nothing: 0. Without `grpo_norm_by_std` there is no division. With one turn
    a sample this is GRPO, groups of one aside. (A token's baseline depends on nothing the token could change.)

    Args:
        turns: [B, T] or [T] int64, from `turn_numbers`.

    Returns:
        advantages and G at every token, [B, T], 0 outside `response_mask`.
    """
    # Turn k is column k + 1: what is masked lands in column 0, and is left there.
    columns = torch.where(response_mask != 0, turns.expand_as(response_mask) + 1, 0)
    num_columns = int(columns.max()) + 1 if columns.numel() else 1
    nothing = torch.zeros(len(columns), num_columns, dtype=torch.float64, device=columns.device)
    rewards_BK = nothing.scatter_add(1, columns, token_level_rewards.double())[:, 1:]
    counts_BK = nothing.scatter(1, columns, 1.0)[:, 1:] != 0
    returns_BK = _returns(rewards_BK, torch.ones_like(counts_BK), torch.ones_like(counts_BK), gamma)
    # A group's turn k is a group of its own.
    group_BK = group_numbers(index).to(columns.device)[:, None] * (num_columns - 1)
    group_BK = group_BK + torch.arange(num_columns - 1, device=columns.device)
    mean_G, size_G = group_means(returns_BK.flatten(), group_BK.flatten(), counts_BK.flatten())
    centred_BK = torch.where(size_G[group_BK] > 1, returns_BK - mean_G[group_BK], 0.0)
    if grpo_norm_by_std:
        std_G = _group_stds(centred_BK.flatten(), group_BK.flatten(), counts_BK.flatten(), size_G)
        centred_BK = centred_BK / (std_G[group_BK] + _EPSILON)
    dtype = token_level_rewards.dtype
    advantages, returns = (F.pad(values, (1, 0)).to(dtype).gather(1, columns) for values in (centred_BK, returns_BK))
    return advantages, returns


@register_advantage_estimator("token_reward", requires=EstimatorRequirements(critic=False, single_tokens=True))
def token_reward_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Use every token's own reward as its advantage; nothing later counts: A_bt = reward_bt.

    For on-policy distillation, where the reward of a token is how much likelier a teacher thinks it
    (https://arxiv.org/abs/2306.13649 with the reverse KL divergence).

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    advantages = torch.where(response_mask != 0, token_level_rewards, 0.0)
    return advantages, advantages


@register_advantage_estimator("reinforce++", requires=EstimatorRequirements(critic=False, whole_trajectories=True))
def reinforce_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    action_mask: torch.Tensor,
    gamma: float = 1.0,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): the discounted rewards from a token on, normalised over the
    batch. Over the action tokens 1, 2, ... of a sequence:

        G_i = R_i + gamma * G_(i+1)
        A_i = (G_i - mean of G) / std of G                  over the action tokens of the whole batch

    R_i is the reward on action token i and on what the environment wrote until the next: time passes only where the
    model acts. A reward before the first action token is nobody's.

    Returns:
        advantages and G, [B, T], 0 outside `action_mask`.
    """
    returns = _returns(token_level_rewards, response_mask != 0, action_mask != 0, gamma)
    return normalize_advantages(returns, action_mask), returns


@register_advantage_estimator("gae", requires=EstimatorRequirements(critic=True, whole_trajectories=True))
def gae_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    action_mask: torch.Tensor,
    values: torch.Tensor | None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16), over the action tokens 1, 2, ... of
    a sequence, with V 0 after the last:

        delta_i = R_i + gamma * V_(i+1) - V_i
        A_i     = delta_i + gamma * lambda * A_(i+1)
        return  = A_i + V_i

    and then A normalised over the action tokens of the whole batch, as in PPO. R_i is the reward on action token i and
    on what the environment wrote until the next; neither the environment's tokens nor the values there count as time.
    A reward before the first action token is nobody's.

    Args:
        values: [B, T], what the critic expects before each token is written.

    Returns:
        advantages (normalised) and returns (not), [B, T], 0 outside `action_mask`.

    Raises:
        ValueError: `values` is None.
    """
    if values is None:
        raise ValueError("gae needs the critic's values")
    actions = action_mask != 0
    returns = _returns(token_level_rewards, response_mask != 0, actions, gamma, lambd, values)
    return normalize_advantages(returns - values, actions), returns


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalise advantages to mean 0 and variance 1 over the tokens where mask is 1; 0 elsewhere. [B, T]

    The variance is the sample's (divisor n - 1), and 1e-8 is added to it: equal advantages, or a single one, become 0.
    """
    kept = mask != 0
    count = torch.count_nonzero(kept)
    centred = torch.where(kept, advantages, 0.0)
    # In float64: the mean of equal float32 values is then that value, and a batch without differences becomes 0 instead
    # of a rounding error divided by itself. The sum casts as it goes, without a copy.
    mean = centred.sum(dim=-1, dtype=torch.float64).sum() / count.clamp(min=1)
    centred.sub_(mean).masked_fill_(~kept, 0.0)
    variance = torch.linalg.vector_norm(centred, dim=-1).double().square().sum() / (count - 1).clamp(min=1)
    return centred.mul_(torch.rsqrt(variance + 1e-8))


# ---- groups


def group_numbers(index: Sequence[Hashable]) -> torch.Tensor:
    """Group names as numbers 0..G-1 [B], in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in index], dtype=torch.int64)


def group_means(
    scores_B: torch.Tensor, group_B: torch.Tensor, counts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean score and number of the samples of each group that count [G]; a group in which none does has 0 and 0."""
    size_G = torch.bincount(group_B, weights=counts_B.double())
    sum_G = torch.bincount(group_B, weights=torch.where(counts_B, scores_B, 0.0).double())
    return sum_G / size_G.clamp(min=1), size_G


def _group_stds(
    centred_B: torch.Tensor, group_B: torch.Tensor, counts_B: torch.Tensor, size_G: torch.Tensor
) -> torch.Tensor:
    """Standard deviation of each group [G] (divisor n - 1) of scores from which the group's mean was taken off."""
    squares_B = torch.where(counts_B, centred_B, 0.0).square()
    return (torch.bincount(group_B, weights=squares_B) / (size_G - 1).clamp(min=1)).sqrt()


def _scores_and_groups(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each sequence, [B] each: its summed reward (float64), the number of its group, and whether it counts
    (one without any token is part of no baseline)."""
    mask = response_mask != 0
    scores_B = torch.where(mask, token_level_rewards, 0.0).sum(dim=-1, dtype=torch.float64)
    return scores_B, group_numbers(index).to(scores_B.device), mask.any(dim=-1)


def _of_every_token(
    values_B: torch.Tensor, mask: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's value at each of its tokens [B, T], as advantages and as returns."""
    advantages = torch.where(mask != 0, values_B.to(like.dtype)[:, None], 0.0)
    return advantages, advantages


# ---- time


def _returns(
    rewards: torch.Tensor,
    response: torch.Tensor,
    actions: torch.Tensor,
    gamma: float,
    lambd: float = 1.0,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lambda-returns of action tokens (without values: discounted sums of rewards), [B, T], 0 where there is no action:

        L_i = R_i + gamma * ((1 - lambda) * V_(i+1) + lambda * L_(i+1))

    On tokens t this is S_t = r_t + b_(t+1) + d_(t+1) * S_(t+1), where a step onto an action token costs
    d = gamma * lambda and brings b = gamma * (1 - lambda) * V, and one onto any other token is free. A block of columns
    is done at once: with w the running product of d, w_t * S_t is the sum of w * (r + b) from t to the end of the
    block. Blocks are so short that w stays within float64's range, and rows are taken so many at a time that what is
    worked on stays in the cache.

    Args:
        response, actions: [B, T] bool.
    """
    returns = torch.empty_like(rewards)
    discount = max(gamma * lambd, _SMALLEST_DISCOUNT)
    num_columns = rewards.shape[1]
    width = max(1, int(min(num_columns, _LARGEST_EXPONENT / max(abs(math.log(discount)), 1e-9))))
    for first_row in range(0, len(rewards), _ROWS):
        later: torch.Tensor | float = 0.0  # what the tokens after a block are worth to its last one
        for first_column in range((num_columns - 1) // width * width, -1, -width):
            block = slice(first_row, first_row + _ROWS), slice(first_column, first_column + width)
            gains = torch.where(response[block], rewards[block], 0.0).double()
            acts = actions[block].double()
            steps = (acts * (discount - 1)).add_(1)
            gains[:, -1:] += later
            if values is not None:
                expected = torch.where(actions[block], values[block], 0.0).double().mul_(gamma * (1 - lambd))
                gains[:, :-1] += expected[:, 1:]
            weights = steps.cumprod(dim=1)
            sums = gains.mul_(weights).flip(1).cumsum(dim=1).flip(1).div_(weights)
            later = steps[:, :1] * sums[:, :1]
            if values is not None:
                later += expected[:, :1]
            returns[block] = sums.mul_(acts)
    return returns
