"""Reductions of per-token losses to a scalar.

Every reduction is a weighted sum over the tokens of the whole mini-batch, and the weights are a function of the loss
mask alone. So they are computed once, before the mini-batch is split over ranks and micro-batches, and no split can
change the loss: each part contributes `(weights * loss).sum()`.

Shapes: B sequences of a mini-batch, T response tokens.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch

from skyrl_train.algorithms.advantages import group_numbers
from skyrl_train.algorithms.masking import at_least_float32

LossReduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]


def token_weights(
    loss_mask: torch.Tensor,
    reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[Hashable] | None = None,
) -> torch.Tensor:
    """Compute weights w [B, T] with `loss = sum_bt w_bt * loss_bt`.

        token_mean                w_bt = m_bt / sum_bt m_bt
        sequence_mean             w_bt = m_bt / (B' * sum_t m_bt)
        seq_mean_token_sum_norm   w_bt = m_bt / (B' * max_seq_len)      (Dr. GRPO, https://arxiv.org/abs/2503.20783)
        prompt_mean               w_bt = m_bt / (P' * sum_ct m_ct over the sequences c of b's prompt)

    B' counts the sequences with at least one token, P' the prompts with at least one: a sequence that is masked out
    entirely (a failed rollout, padding) is as if it had never been sampled.

    Args:
        loss_mask: [B, T], 1 on the tokens the policy wrote.
        max_seq_len: the constant of `seq_mean_token_sum_norm`, in tokens.
        index: for `prompt_mean`, the prompt of each sequence (B hashables).

    Raises:
        ValueError: unknown reduction, or what it needs is missing.
    """
    mask = at_least_float32(loss_mask)
    tokens_B1 = mask.sum(dim=1, keepdim=True)
    # clamp: a mini-batch in which every rollout failed has loss 0 and not 0 / 0.
    num_sequences = (tokens_B1 > 0).sum().clamp(min=1)
    if reduction == "token_mean":
        return mask / mask.sum().clamp(min=1)
    if reduction == "sequence_mean":
        return mask / (num_sequences * tokens_B1.clamp(min=1))
    if reduction == "seq_mean_token_sum_norm":
        if not max_seq_len:
            raise ValueError("seq_mean_token_sum_norm divides by max_seq_len: give a positive number of tokens")
        return mask / (num_sequences * max_seq_len)
    if reduction == "prompt_mean":
        if index is None or len(index) != len(mask):
            raise ValueError("prompt_mean averages over prompts: give the prompt of every sequence as `index`")
        prompt_B = group_numbers(index).to(mask.device)
        # There are at most as many prompts as sequences; places of prompts that do not exist stay 0 and are not
        # counted.
        tokens_P = torch.zeros(len(mask), dtype=mask.dtype, device=mask.device).index_add_(0, prompt_B, tokens_B1[:, 0])
        num_prompts = (tokens_P > 0).sum().clamp(min=1)
        return mask / (num_prompts * tokens_P[prompt_B].clamp(min=1)).unsqueeze(1)
    raise ValueError(f"loss_reduction must be one of {', '.join(get_args(LossReduction))}; got {reduction!r}")


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of weights * values in which what has weight 0 may be anything, NaN and infinity included."""
    # NaN * 0 is NaN, so what has no weight is replaced and not multiplied. Its gradient is 0 as well.
    return torch.where(weights != 0, values * weights, 0.0).sum()


def reduce_loss(
    loss: torch.Tensor,
    loss_mask: torch.Tensor | None,
    loss_reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[Hashable] | None = None,
) -> torch.Tensor:
    """Reduce per-token losses [B, T] of a whole batch to a scalar. Arguments: see `token_weights`."""
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    return weighted_sum(loss, token_weights(mask, loss_reduction, max_seq_len, index))


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None, dim: int | None = None) -> torch.Tensor:
    """Mean of the values where mask is 1; 0 where it is nowhere 1. `dim=None`: over everything."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    kept = torch.where(mask != 0, values * mask, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
