"""How per-token losses become one number.

Every reduction is a weighted sum over the tokens of the whole mini-batch, and the weights are a function of the loss
mask alone. So they are computed once, before the mini-batch is split over ranks and micro-batches, and no split can
change
the
loss: each part contributes `(weights * loss).sum()`.

Shapes: B sequences of a mini-batch, T response tokens.
"""

from typing import Literal

import torch

LossReduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"]


def token_weights(loss_mask: torch.Tensor, reduction: LossReduction, max_seq_len: int | None = None) -> torch.Tensor:
    """Weights w [B, T] with `loss = sum_bt w_bt * loss_bt`.

        token_mean                w_bt = m_bt / sum_bt m_bt
        sequence_mean             w_bt = m_bt / (B' * sum_t m_bt)
        seq_mean_token_sum_norm   w_bt = m_bt / (B' * max_seq_len)      (Dr. GRPO, https://arxiv.org/abs/2503.20783)

    B' counts the sequences with at least one token: a sequence that is masked out entirely (a failed rollout, padding)
    is as if it had never been sampled.

    Args:
        loss_mask: [B, T], 1 on the tokens the policy wrote.
        max_seq_len: the constant of `seq_mean_token_sum_norm`, in tokens.

    Raises:
        ValueError: unknown reduction, or `max_seq_len` missing.
    """
    mask = loss_mask.float()
    tokens_B1 = mask.sum(dim=1, keepdim=True)
    num_sequences = (tokens_B1 > 0).sum().clamp(min=1)
    if reduction == "token_mean":
        return mask / mask.sum().clamp(min=1)
    if reduction == "sequence_mean":
        return mask / (num_sequences * tokens_B1.clamp(min=1))
    if reduction == "seq_mean_token_sum_norm":
        if not max_seq_len:
            raise ValueError("seq_mean_token_sum_norm divides by max_seq_len: give a positive number of tokens")
        return mask / (num_sequences * max_seq_len)
    raise ValueError(
        f"loss_reduction must be one of token_mean, sequence_mean, seq_mean_token_sum_norm; got {reduction!r}"
    )


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of weights * values in which what has weight 0 may be anything, NaN and infinity included."""
    return torch.where(weights != 0, values * weights, 0.0).sum()


def reduce_loss(
    loss: torch.Tensor, loss_mask: torch.Tensor | None, loss_reduction: LossReduction, max_seq_len: int | None = None
) -> torch.Tensor:
    """One number out of per-token losses [B, T] that are here in full."""
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    return weighted_sum(loss, token_weights(mask, loss_reduction, max_seq_len))


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None, dim: int | None = None) -> torch.Tensor:
    """Mean of the values where mask is 1; 0 where it is nowhere 1. `dim=None`: over everything."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    kept = torch.where(mask != 0, values * mask, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
