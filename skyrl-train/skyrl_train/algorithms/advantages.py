"""Advantage estimators, which map rewards to advantages of tokens.

Failed rollouts are removed before an estimator is called, so that none of them enters a baseline. The response mask is
1 on tokens of the model and the environment, the action mask on tokens of the model (which are trained). Values outside
the response mask may be anything, including NaN. Sums run in float64: results do not depend on the order of rows and
tokens, and equal scores have a variance of exactly 0.

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
"""Called with keywords: `token_level_rewards` [B, T], `response_mask` [B, T], `action_mask` [B, T], `index` (B group
names), `turns` [B, T] int64 (turn number of each token), `values` [B, T] or None, `config` (AlgorithmConfig),
`grpo_norm_by_std`, `gamma`, `lambd`; an estimator declares the ones it needs, and `**_`. Returns advantages and
returns, both [B, T]."""

__all__ = [
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "EstimatorRequirements",
    "compute_group_means",
    "compute_group_numbers",
    "compute_turn_numbers",
    "count_negative_groups",
    "normalize_advantages",
    "register_advantage_estimator",
]

_GROUPS = EstimatorRequirements(critic=False, groups=True)

_EPSILON = 1e-6
_ROWS = 128
_LARGEST_EXPONENT = 500.0
_SMALLEST_DISCOUNT = 1e-12  # replaces 0, because the recursion divides by it


# ---- one advantage a sequence, from its group


@register_advantage_estimator("grpo", requires=_GROUPS)
def grpo_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    grpo_norm_by_std: bool = True,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute group-relative advantages (GRPO, https://arxiv.org/abs/2402.03300, section 4.1):

        score_b = sum_t reward_bt
        A_bt    = (score_b - mean of the group) / (std of the group + 1e-6)

    with the sample standard deviation (divisor n - 1). A group of one has no baseline: mean 0, std 1. Without
    `grpo_norm_by_std` the scores are not divided (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _compute_scores_and_groups(token_level_rewards, response_mask, index)
    mean_G, size_G = compute_group_means(scores_B, group_B, counts_B)
    alone_B = size_G[group_B] == 1
    centred_B = scores_B - torch.where(alone_B, 0.0, mean_G[group_B])
    if grpo_norm_by_std:
        std_G = _compute_group_stds(centred_B, group_B, counts_B, size_G)
        centred_B = centred_B / (torch.where(alone_B, 1.0, std_G[group_B]) + _EPSILON)
    return _expand_to_tokens(centred_B, response_mask, token_level_rewards)


@register_advantage_estimator("rloo", requires=_GROUPS)
def rloo_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE advantages with the mean of the *other* samples of the prompt as baseline (RLOO,
    https://arxiv.org/abs/2402.14740, section 2.2):

        A_b = score_b - (sum of the group's scores - score_b) / (n - 1)  =  n / (n - 1) * (score_b - mean of the group)

    The baseline of a sample does not depend on the sample, so the gradient is unbiased. In a group of one the advantage
    is 0.

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _compute_scores_and_groups(token_level_rewards, response_mask, index)
    mean_G, size_G = compute_group_means(scores_B, group_B, counts_B)
    scale_G = size_G / (size_G - 1).clamp(min=1)
    return _expand_to_tokens((scores_B - mean_G[group_B]) * scale_G[group_B], response_mask, token_level_rewards)


@register_advantage_estimator(
    "maxrl", requires=EstimatorRequirements(critic=False, groups=True, nonnegative_scores=True)
)
def maxrl_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages of maximum-likelihood reinforcement learning (MaxRL, https://arxiv.org/abs/2602.02710). Scores
    are successes, and the objective is the log of the success probability, so that rare successes weigh more:

        A_b = (score_b - mean of the group) / mean of the group         0 in a group whose mean is 0

    Defined for non-negative scores only. A group with a negative mean gets 0 (the division would flip the signs);
    `count_negative_groups` counts such groups. In a group of one, the mean is the score: 0.

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B, group_B, counts_B = _compute_scores_and_groups(token_level_rewards, response_mask, index)
    mean_G = compute_group_means(scores_B, group_B, counts_B)[0]
    mean_B = mean_G[group_B]
    divisor_B = torch.where(mean_B > 0, mean_B, 1.0)
    values_B = torch.where(mean_B > 0, (scores_B - mean_B) / divisor_B, 0.0)
    return _expand_to_tokens(values_B, response_mask, token_level_rewards)


def count_negative_groups(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable]
) -> int:
    """Count the groups with a mean score below 0, for which `maxrl` is not defined."""
    scores_B, group_B, counts_B = _compute_scores_and_groups(token_level_rewards, response_mask, index)
    return int((compute_group_means(scores_B, group_B, counts_B)[0] < 0).sum())


@register_advantage_estimator("reinforce++_baseline", requires=_GROUPS)
def reinforce_baseline_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    action_mask: torch.Tensor,
    index: Sequence[Hashable],
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE++ advantages with baseline (https://arxiv.org/abs/2501.03262): the mean is per group, the scale
    per batch, so that groups of nearly equal scores are not amplified as by GRPO:

        A'_bt = score_b - mean of the group                 at every action token
        A_bt  = (A'_bt - mean of A') / std of A'            over the action tokens of the whole batch

    As in the paper, mean and std are over all tokens, so that long responses weigh more. With groups of equal size, the
    leave-one-out baseline is equivalent: its factor n / (n - 1) cancels. The paper's KL penalty is a separate setting
    (`use_kl_loss` or `use_kl_in_reward`). In a group of one, A' is 0.

    Returns:
        advantages, [B, T], 0 outside `action_mask`, and A' as returns.
    """
    scores_B, group_B, counts_B = _compute_scores_and_groups(token_level_rewards, response_mask, index)
    mean_G = compute_group_means(scores_B, group_B, counts_B)[0]
    centred = _expand_to_tokens(scores_B - mean_G[group_B], action_mask, token_level_rewards)[0]
    return normalize_advantages(centred, action_mask), centred


# ---- credit over turns and tokens


def compute_turn_numbers(action_mask: torch.Tensor) -> torch.Tensor:
    """Compute the turn number of each token, from 0: int64 [B, T].

    A turn starts with a run of 1s in the action mask and ends before the next run, so it includes the environment's
    response. Tokens before the first run belong to turn 0.
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
    """Compute turn-level GRPO advantages: a turn is compared with the same turn of the other samples of the prompt, by
    the discounted rewards from that turn on. r_bk is the sum of the rewards on the tokens of turn k:

        G_bk = sum_(j >= k) gamma^(j - k) r_bj
        A_bt = (G_bk - mean_k) / (std_k + 1e-6)             k the turn of token t

    Mean and (sample) standard deviation are over the samples of the group that have a turn k. A turn of only one sample
    gets 0. Without `grpo_norm_by_std` the returns are not divided. With a single turn per sample this equals GRPO,
    except for groups of one. (A token's baseline depends on nothing that the token could change.)

    Args:
        turns: [B, T] or [T] int64, from `compute_turn_numbers`.

    Returns:
        advantages and G at every token, [B, T], 0 outside `response_mask`.
    """
    # Turn k is column k + 1: masked tokens are added to column 0, which is ignored.
    columns = torch.where(response_mask != 0, turns.expand_as(response_mask) + 1, 0)
    num_columns = int(columns.max()) + 1 if columns.numel() else 1
    nothing = torch.zeros(len(columns), num_columns, dtype=torch.float64, device=columns.device)
    rewards_BK = nothing.scatter_add(1, columns, token_level_rewards.double())[:, 1:]
    counts_BK = nothing.scatter(1, columns, 1.0)[:, 1:] != 0
    returns_BK = _compute_returns(rewards_BK, torch.ones_like(counts_BK), torch.ones_like(counts_BK), gamma)
    # Turn k of a group is treated as a separate group.
    group_BK = compute_group_numbers(index).to(columns.device)[:, None] * (num_columns - 1)
    group_BK = group_BK + torch.arange(num_columns - 1, device=columns.device)
    mean_G, size_G = compute_group_means(returns_BK.flatten(), group_BK.flatten(), counts_BK.flatten())
    centred_BK = torch.where(size_G[group_BK] > 1, returns_BK - mean_G[group_BK], 0.0)
    if grpo_norm_by_std:
        std_G = _compute_group_stds(centred_BK.flatten(), group_BK.flatten(), counts_BK.flatten(), size_G)
        centred_BK = centred_BK / (std_G[group_BK] + _EPSILON)
    dtype = token_level_rewards.dtype
    advantages, returns = (F.pad(values, (1, 0)).to(dtype).gather(1, columns) for values in (centred_BK, returns_BK))
    return advantages, returns


@register_advantage_estimator("token_reward", requires=EstimatorRequirements(critic=False, single_tokens=True))
def token_reward_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Use every token's reward as its advantage, without later rewards: A_bt = reward_bt.

    For on-policy distillation, where the reward of a token is its log-ratio of teacher to student
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
    """Compute REINFORCE++ advantages (https://arxiv.org/abs/2501.03262): discounted returns, normalized over the batch.
    Over the action tokens 1, 2, ... of a sequence:

        G_i = R_i + gamma * G_(i+1)
        A_i = (G_i - mean of G) / std of G                  over the action tokens of the whole batch

    R_i is the reward on action token i and on the environment tokens before the next one: only action tokens are
    discounted. Rewards before the first action token are ignored.

    Returns:
        advantages and G, [B, T], 0 outside `action_mask`.
    """
    returns = _compute_returns(token_level_rewards, response_mask != 0, action_mask != 0, gamma)
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
    """Compute generalized advantage estimates (https://arxiv.org/abs/1506.02438, eq. 16), over the action tokens 1, 2,
    ... of a sequence, with V 0 after the last:

        delta_i = R_i + gamma * V_(i+1) - V_i
        A_i     = delta_i + gamma * lambda * A_(i+1)
        return  = A_i + V_i

    A is then normalized over the action tokens of the whole batch, as in PPO. R_i is the reward on action token i and
    on the environment tokens before the next one; environment tokens and their values are skipped. Rewards before the
    first action token are ignored.

    Args:
        values: [B, T], the critic's prediction before each token.

    Returns:
        advantages (normalized) and returns (not), [B, T], 0 outside `action_mask`.

    Raises:
        ValueError: `values` is None.
    """
    if values is None:
        raise ValueError("gae needs values of the critic")
    actions = action_mask != 0
    returns = _compute_returns(token_level_rewards, response_mask != 0, actions, gamma, lambd, values)
    return normalize_advantages(returns - values, actions), returns


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalize advantages to mean 0 and variance 1 over the tokens where mask is 1; 0 elsewhere. [B, T]

    The variance is the sample variance (divisor n - 1) plus 1e-8: equal advantages, or a single one, become 0.
    """
    kept = mask != 0
    count = torch.count_nonzero(kept)
    centred = torch.where(kept, advantages, 0.0)
    # In float64 the mean of equal float32 values is that value, so that a batch without differences becomes 0 instead
    # of an amplified rounding error. The sum casts on the fly, without a copy.
    mean = centred.sum(dim=-1, dtype=torch.float64).sum() / count.clamp(min=1)
    centred.sub_(mean).masked_fill_(~kept, 0.0)
    variance = torch.linalg.vector_norm(centred, dim=-1).double().square().sum() / (count - 1).clamp(min=1)
    return centred.mul_(torch.rsqrt(variance + 1e-8))


# ---- groups


def compute_group_numbers(index: Sequence[Hashable]) -> torch.Tensor:
    """Map group names to numbers 0..G-1 [B], in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in index], dtype=torch.int64)


def compute_group_means(
    scores_B: torch.Tensor, group_B: torch.Tensor, counts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mean score and number of counted samples of each group [G]; both are 0 for a group without any."""
    size_G = torch.bincount(group_B, weights=counts_B.double())
    sum_G = torch.bincount(group_B, weights=torch.where(counts_B, scores_B, 0.0).double())
    return sum_G / size_G.clamp(min=1), size_G


def _compute_group_stds(
    centred_B: torch.Tensor, group_B: torch.Tensor, counts_B: torch.Tensor, size_G: torch.Tensor
) -> torch.Tensor:
    """Compute the standard deviation of each group [G] (divisor n - 1) from scores minus the group's mean."""
    squares_B = torch.where(counts_B, centred_B, 0.0).square()
    return (torch.bincount(group_B, weights=squares_B) / (size_G - 1).clamp(min=1)).sqrt()


def _compute_scores_and_groups(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute for each sequence, [B] each: its summed reward (float64), its group number, and whether it counts (a
    sequence without tokens does not)."""
    mask = response_mask != 0
    scores_B = torch.where(mask, token_level_rewards, 0.0).sum(dim=-1, dtype=torch.float64)
    return scores_B, compute_group_numbers(index).to(scores_B.device), mask.any(dim=-1)


def _expand_to_tokens(
    values_B: torch.Tensor, mask: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand values of sequences to their tokens [B, T], as advantages and as returns."""
    advantages = torch.where(mask != 0, values_B.to(like.dtype)[:, None], 0.0)
    return advantages, advantages


# ---- time


def _compute_returns(
    rewards: torch.Tensor,
    response: torch.Tensor,
    actions: torch.Tensor,
    gamma: float,
    lambd: float = 1.0,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute lambda-returns of action tokens (without values: discounted sums of rewards), [B, T], 0 elsewhere:

        L_i = R_i + gamma * ((1 - lambda) * V_(i+1) + lambda * L_(i+1))

    On tokens t this is S_t = r_t + b_(t+1) + d_(t+1) * S_(t+1), where a step onto an action token has d = gamma *
    lambda and b = gamma * (1 - lambda) * V, and a step onto any other token has d = 1 and b = 0. Columns are processed
    in blocks: with w the running product of d, w_t * S_t is the sum of w * (r + b) from t to the end of the block.
    Blocks are short, so that w stays within float64's range; rows are processed in chunks that fit in the cache.

    Args:
        response, actions: [B, T] bool.
    """
    returns = torch.empty_like(rewards)
    discount = max(gamma * lambd, _SMALLEST_DISCOUNT)
    num_columns = rewards.shape[1]
    width = max(1, int(min(num_columns, _LARGEST_EXPONENT / max(abs(math.log(discount)), 1e-9))))
    for first_row in range(0, len(rewards), _ROWS):
        later: torch.Tensor | float = 0.0  # return of the tokens after the block
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
