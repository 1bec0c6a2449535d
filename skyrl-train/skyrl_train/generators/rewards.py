"""Rewards of turns as rewards of tokens, and overlong filtering of columns. Pure functions of lists."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnReward:
    """Reward of one turn, and the index in the response of the turn's last token."""

    token_index: int
    reward: float


def token_rewards(num_tokens: int, turn_rewards: Sequence[TurnReward]) -> list[float]:
    """Return one reward a token: 0 everywhere but at the turns' last tokens. A turn without tokens adds its reward to
    the token before.

    `num_tokens` is at least 1.
    """
    rewards = [0.0] * num_tokens
    for turn in turn_rewards:
        rewards[min(max(turn.token_index, 0), num_tokens - 1)] += turn.reward
    return rewards


def apply_overlong_filtering(loss_masks: list[list[int]], stop_reasons: list[str]) -> list[list[int]]:
    """Take trajectories that ran out of length out of the loss (DAPO's overlong filtering, https://arxiv.org/abs/2503.14476).

    Judged by the stop reason: one that was ended by its environment without an end-of-sequence token stays, one that
    was cut off just behind such a token does not. The lists given are left as they are.
    """
    return [
        [0] * len(loss_mask) if stop_reason == "length" else loss_mask
        for loss_mask, stop_reason in zip(loss_masks, stop_reasons, strict=True)
    ]
