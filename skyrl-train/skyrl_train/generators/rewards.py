"""Conversion of turn rewards to token rewards, and overlong filtering of columns. Pure functions of lists."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnReward:
    """Reward of one turn, and the response index of the turn's last token."""

    token_index: int
    reward: float


def compute_token_rewards(num_tokens: int, turn_rewards: Sequence[TurnReward]) -> list[float]:
    """Return one reward per token: 0 except at the turns' last tokens. The reward of a turn without tokens is added to
    the previous token.

    `num_tokens` is at least 1.
    """
    rewards = [0.0] * num_tokens
    for turn in turn_rewards:
        rewards[min(max(turn.token_index, 0), num_tokens - 1)] += turn.reward
    return rewards


def apply_overlong_filtering(loss_masks: list[list[int]], stop_reasons: list[str]) -> list[list[int]]:
    """Mask trajectories that were truncated by length (DAPO's overlong filtering, https://arxiv.org/abs/2503.14476).

    The stop reason decides: a trajectory ended by its environment without an end-of-sequence token is kept, a
    trajectory truncated directly after such a token is masked. The input lists are not modified.
    """
    return [
        [0] * len(loss_mask) if stop_reason == "length" else loss_mask
        for loss_mask, stop_reason in zip(loss_masks, stop_reasons, strict=True)
    ]
