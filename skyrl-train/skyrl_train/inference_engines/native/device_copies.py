"""Copies of small arrays between host and device that wait for each other as little as possible."""

from collections.abc import Sequence

import numpy as np
import torch

from skyrl_train.utils.device_copies import copy_to_device


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device."""
    return copy_to_device(torch.from_numpy(array), device)


def download(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy tensors [B] or [B, N] of one device to the host in a single copy, the only one that waits for the device.

    Integers must be below 2^53: they share a float64 array with the others.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return _split_columns(_join_columns(tensors).cpu(), tensors)


def _join_columns(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the columns of tensors with the same number of rows side by side, [B, all N] float64."""
    return torch.cat([tensor.double().view(len(tensor), -1) for tensor in tensors], dim=1)


def _split_columns(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Undo `_join_columns`, with the shapes and dtypes of `like`."""
    widths = [tensor[:1].numel() for tensor in like]
    parts = joined.split(widths, dim=1)
    return [part.to(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(parts, like, strict=True)]
