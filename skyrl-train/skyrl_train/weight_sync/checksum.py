"""A checksum of parameters that is cheap on any device and sees a swapped pair as well as a flipped bit."""

from collections.abc import Iterable

import torch

MODULUS = (1 << 61) - 1  # a Mersenne prime: products of two 31-bit numbers stay far below int64's limit
_CHUNK = 1 << 20


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Sum over the tensor's bytes b_i of (b_i + 1) * w_i with position weights w_i, modulo 2^61 - 1."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64) + 1
        # Weights below 2^31, bytes below 2^9, 2^20 terms: the sum stays below 2^60.
        weights = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        weights = (weights * 2654435761 + 40503) % 2147483647
        total = (total + int((part * weights).sum())) % MODULUS
    return total


def checksum_of(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Checksum of named tensors, whatever their order; a value under another name counts as different."""
    total = 0
    for name, tensor in named_tensors:
        name_hash = int.from_bytes(name.encode(), "big") % MODULUS
        total = (total + (tensor_checksum(tensor) + 1) * (name_hash + 1)) % MODULUS
    return total
