"""Reductions of per-token losses to a scalar.

Every reduction is a weighted sum over the tokens of the whole mini-batch, and the weights depend only on the loss mask.
They are computed once, before the mini-batch is split over ranks and micro-batches, so no split can change the loss:
each part contributes `(weights * loss).sum()`.

Shapes: B sequences of a mini-batch, T response tokens.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch

from skyrl_train.algorithms.advantages import compute_group_numbers
from skyrl_train.algorithms.masking import to_at_least_float32

LossReduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]


def token_weights(
    loss_mask: torch.Tensor,
    reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[Hashable] | None = None,
    sequences: Sequence[Hashable] | None = None,
) -> torch.Tensor:
    """Compute weights w [B, T] with `loss = sum_bt w_bt * loss_bt`.

        token_mean                w_bt = m_bt / sum_bt m_bt
        sequence_mean             w_bt = m_bt / (S' * sum_ct m_ct over the rows c of b's sequence)
        seq_mean_token_sum_norm   w_bt = m_bt / (S' * max_seq_len)      (Dr. GRPO, https://arxiv.org/abs/2503.20783)
        prompt_mean               w_bt = m_bt / (P' * sum_ct m_ct over the rows c of b's prompt)

    S' counts the sequences with at least one token, P' the prompts with at least one: a fully masked sequence (a failed
    rollout, padding) has no effect.

    Args:
        loss_mask: [B, T], 1 on tokens of the policy.
        max_seq_len: the constant of `seq_mean_token_sum_norm`, in tokens.
        index: for `prompt_mean`, the prompt of each row (B hashables).
        sequences: the sequence of each row (B hashables), so that all turns or branches of a trajectory count as one
            sequence. None: each row is one.

    Raises:
        ValueError: unknown reduction, or a missing argument.
    """
    mask = to_at_least_float32(loss_mask)
    tokens_B1 = mask.sum(dim=1, keepdim=True)
    if reduction == "token_mean":
        # clamp: a mini-batch in which every rollout failed has loss 0 and not 0 / 0.
        return mask / mask.sum().clamp(min=1)
    if reduction in ("sequence_mean", "seq_mean_token_sum_norm"):
        if sequences is not None:
            tokens_B1, num_sequences = _sum_by_group(tokens_B1, sequences)
        else:
            num_sequences = (tokens_B1 > 0).sum().clamp(min=1)
        if reduction == "sequence_mean":
            return mask / (num_sequences * tokens_B1.clamp(min=1))
        if not max_seq_len:
            raise ValueError("seq_mean_token_sum_norm divides by max_seq_len, which must be greater than 0")
        return mask / (num_sequences * max_seq_len)
    if reduction == "prompt_mean":
        if index is None or len(index) != len(mask):
            raise ValueError("prompt_mean averages over prompts: pass the prompt index of each sequence as `index`")
        tokens_B1, num_prompts = _sum_by_group(tokens_B1, index)
        return mask / (num_prompts * tokens_B1.clamp(min=1))
    raise ValueError(f"loss_reduction must be one of {', '.join(get_args(LossReduction))}; got {reduction!r}")


def _sum_by_group(tokens_B1: torch.Tensor, groups: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row the tokens of all rows of its group [B, 1], and the number of non-empty groups, at
    least 1."""
    group_B = compute_group_numbers(groups).to(tokens_B1.device)
    # There are at most as many groups as rows; cells of missing groups stay 0 and are not counted.
    tokens_G1 = torch.zeros_like(tokens_B1).index_add_(0, group_B, tokens_B1)
    return tokens_G1[group_B], (tokens_G1 > 0).sum().clamp(min=1)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the sum of weights * values, in which values with weight 0 may be NaN or infinite."""
    # NaN * 0 is NaN, so values without weight are replaced and not multiplied. Their gradient is 0 as well.
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
    """Compute the mean of the values where mask is 1; 0 if it is 1 nowhere. `dim=None`: over all elements."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    kept = torch.where(mask != 0, values * mask, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
