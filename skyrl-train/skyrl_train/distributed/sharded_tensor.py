"""Tensors that are divided over ranks (torch's DTensor)."""

import torch
from torch.distributed.tensor import DTensor


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, and any other tensor as it is. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
