"""Padding of trajectories to tensors.

B trajectories, P longest prompt, R longest response, T = P + R:

    sequences   | pad pad prompt | response pad |     prompts end, and responses start, at the same column P

Mask and reward tensors cover the responses only: column r of them is column P + r of the sequences.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_train.rollouts.types import NO_VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def convert_prompts_responses_to_batch_tensors(
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[list[float]],
    loss_masks: list[list[int]],
    logprobs: list[list[float]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Pad B trajectories into tensors.

    Args:
        tokenizer: tokenizer with a padding id.
        prompts, responses: token ids.
        rewards, loss_masks, logprobs: one entry per response token.

    Returns:
        sequences [B, T], int64.
        attention_mask [B, T], int64: 1 on tokens, 0 on padding.
        response_mask [B, R], int64: 1 on response tokens, generated or not. rewards [B, R], float32, 0 on padding.
        loss_masks [B, R], float32: 1 on trained tokens, 0 on padding. logprobs [B, R], float32, 0 on padding; None if
        none are given.

    Raises:
        ValueError: no trajectories, lists of different lengths, or a tokenizer without a padding token.
    """
    _check_lengths(prompts, responses, rewards, loss_masks, logprobs)
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token; set tokenizer.pad_token (to its eos_token, for example)")
    pad_id: int = tokenizer.pad_token_id  # pyright: ignore[reportAssignmentType]
    prompt_mask, response_mask = _build_length_mask(prompts, left=True), _build_length_mask(responses)
    sequences = torch.cat(
        [_fill(prompts, prompt_mask, torch.int64, pad_id), _fill(responses, response_mask, torch.int64, pad_id)], dim=1
    )
    return (
        sequences,
        torch.cat([prompt_mask, response_mask], dim=1).long(),
        response_mask.long(),
        _fill(rewards, response_mask, torch.float32),
        _fill(loss_masks, response_mask, torch.float32),
        None if logprobs is None else _fill(logprobs, response_mask, torch.float32),
    )


def pad_versions(versions: Sequence[Sequence[int] | None], response_mask: torch.Tensor) -> torch.Tensor:
    """Return weight versions as [B, R] int32: `NO_VERSION` on padding and in rows without versions.

    Args:
        versions: one entry per response token, or None for the whole row.
        response_mask: [B, R], 1 on response tokens.
    """
    lengths_B = response_mask.sum(dim=1).tolist()
    known = [[NO_VERSION] * length if row is None else row for row, length in zip(versions, lengths_B, strict=True)]
    return _fill(known, response_mask != 0, torch.int32, NO_VERSION)


def _build_length_mask(rows: Sequence[Sequence[object]], left: bool = False) -> torch.Tensor:
    """Return a mask [B, L], True where a row has an entry: at the start of the row, or at its end if padded on the
    left."""
    lengths_B = torch.tensor([len(row) for row in rows])
    columns_L = torch.arange(int(lengths_B.max()))
    mask_BL = columns_L < lengths_B[:, None]
    return mask_BL.flip(1) if left else mask_BL


def _fill(
    rows: Sequence[Sequence[float]], mask_BL: torch.Tensor, dtype: torch.dtype, padding: float = 0
) -> torch.Tensor:
    """Return a tensor [B, L] with the concatenated entries of all rows where the mask is True, and padding
    elsewhere."""
    # for lists of a million entries, numpy takes a third of the time of torch.tensor
    entries = np.fromiter(chain.from_iterable(rows), dtype=_NUMPY_TYPES[dtype])
    return torch.full(mask_BL.shape, padding, dtype=dtype).masked_scatter_(mask_BL, torch.from_numpy(entries))


def _check_lengths(
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[list[float]],
    loss_masks: list[list[int]],
    logprobs: list[list[float]] | None,
) -> None:
    if not responses:
        raise ValueError("no trajectories to build a batch from: responses is empty")
    columns = {"prompts": prompts, "rewards": rewards, "loss_masks": loss_masks}
    if logprobs is not None:
        columns["logprobs"] = logprobs
    for name, column in columns.items():
        if len(column) != len(responses):
            raise ValueError(f"{name} must have the same length as responses; got {len(column)} and {len(responses)}")
        if name == "prompts":
            continue
        for i, (entry, response) in enumerate(zip(column, responses, strict=True)):
            if len(entry) != len(response):
                raise ValueError(
                    f"{name} must have one entry per response token; trajectory {i} has {len(entry)} for "
                    f"{len(response)}"
                )
