"""A checksum of parameters that is cheap on any device and sees a swapped pair as well as a flipped bit."""

from collections.abc import Iterable
from functools import lru_cache

import torch

MODULUS = (1 << 61) - 1  # a Mersenne prime: products of two 31-bit numbers stay far below int64's limit
_CHUNK = 1 << 20
_CHUNK_FACTOR = 1_000_003  # sets chunk k apart from chunk k + 1


def tensor_checksum(tensor: torch.Tensor) -> int:
    """The number of the tensor's bytes b_i, plus the sum of b_i times position weights, modulo 2^61 - 1."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    weights = _weights_of_chunk(flat.device)
    total, factor = flat.numel(), 1
    for part in flat.split(_CHUNK):
        # Weights below 2^31, bytes below 2^8, 2^20 terms: the sum stays below 2^59.
        chunk = int(part.to(torch.int64).mul_(weights[: part.numel()]).sum())
        total = (total + chunk * factor) % MODULUS
        factor = factor * _CHUNK_FACTOR % MODULUS
    return total


@lru_cache(maxsize=8)
def _weights_of_chunk(device: torch.device) -> torch.Tensor:
    """A weight for every position in a chunk, neighbours far apart. [_CHUNK] int64"""
    return (torch.arange(_CHUNK, device=device, dtype=torch.int64) * 2654435761 + 40503) % 2147483647


def checksum_of(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Checksum of named tensors, whatever their order; a value under another name counts as different."""
    total = 0
    for name, tensor in named_tensors:
        name_hash = int.from_bytes(name.encode(), "big") % MODULUS
        total = (total + (tensor_checksum(tensor) + 1) * (name_hash + 1)) % MODULUS
    return total
