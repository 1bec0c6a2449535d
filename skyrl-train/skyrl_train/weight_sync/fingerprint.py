"""Fingerprints of tensors, by which trainer and engine compare weights without sending them.

Equal bytes, dtype and shape give equal fingerprints on every device; others collide with probability 2^-63. The bytes
are hashed on the host; a GPU copies the samples of all tensors there in one transfer.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import xxhash

from skyrl_train.weight_sync.payload import bytes_of

Verification = Literal["sampled", "full", "off"]

WHOLE_BYTES = 1 << 16
"""Tensors up to this size are always read whole."""
BLOCK_BYTES = 1 << 12
MOST_TURNS = 128
"""Upper bound of `num_turns`: at each version, at least one block in this many of a large tensor is read, others each
time."""
_LEAST_BLOCKS = 8  # for a tensor just over the limit
_HOST_CHUNK_BYTES = 1 << 26
_MOST_NAMED = 3


def num_turns(num_bytes: int) -> int:
    """Return the number of consecutive versions in which `sampled` reads every byte of a tensor of this size."""
    if num_bytes <= WHOLE_BYTES:
        return 1
    return min(MOST_TURNS, num_bytes // BLOCK_BYTES // _LEAST_BLOCKS)


@dataclass(frozen=True)
class VerificationSample:
    """Rows or columns of a matrix that are verified at one version: all, or every n-th with an offset that depends on
    the version."""

    version: int
    verification: Verification

    def of(self, length: int, num_bytes: int) -> slice:
        """Return the indices to read among `length`, for a matrix of `num_bytes`: at least 8, otherwise the fraction
        that `sampled` reads."""
        turns = 1 if self.verification == "full" else min(num_turns(num_bytes), max(1, length // _LEAST_BLOCKS))
        return slice(self.version % turns, None, turns)


def num_bytes_read(num_bytes: int, verification: Verification) -> int:
    """Return the number of bytes of a tensor that one fingerprint reads."""
    return num_bytes if verification == "full" else num_bytes // num_turns(num_bytes)


def fingerprint_of(tensor: torch.Tensor, version: int, verification: Verification) -> int:
    """Compute the fingerprint of one tensor, independent of its name.

    Args:
        version: weight version, which selects the blocks read by `sampled`.
        verification: `sampled` or `full`.
    """
    return fingerprints_of([("", tensor)], version, verification)[""]


def fingerprints_of(
    named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, verification: Verification
) -> dict[str, int]:
    """Compute the fingerprint of every tensor, keyed by name; `off`: none. On a GPU cheaper than one call per
    tensor."""
    if verification == "off":
        return {}
    prints: dict[str, int] = {}
    on_device: list[tuple[str, bytes, torch.Tensor]] = []
    for name, tensor in named_tensors:
        header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        flat = bytes_of(tensor)
        if flat.device.type == "cpu":
            read = flat if verification == "full" else _sample(flat, version)
            prints[name] = _compute_hash(header, [read])
        elif verification == "full":
            prints[name] = _compute_hash(header, (chunk.cpu() for chunk in flat.split(_HOST_CHUNK_BYTES)))
        else:
            prints[name] = 0  # keeps the order
            on_device.append((name, header, _sample(flat, version)))
    if on_device:
        sizes = [read.numel() for _, _, read in on_device]
        on_host = torch.cat([read for _, _, read in on_device]).cpu().split(sizes)
        for (name, header, _), read in zip(on_device, on_host, strict=True):
            prints[name] = _compute_hash(header, [read])
    return prints


def differences(expected: Mapping[str, int], report: Mapping[str, int]) -> str:
    """Describe an engine's wrong fingerprints by tensor name; empty if all are correct."""
    kinds = {
        "differ": [name for name, value in expected.items() if name in report and report[name] != value],
        "are missing": [name for name in expected if name not in report],
        "are not the trainer's": [name for name in report if name not in expected],
    }
    return "; ".join(f"{len(names)} {kind}: {some_of(names)}" for kind, names in kinds.items() if names)


def _sample(flat: torch.Tensor, version: int) -> torch.Tensor:
    """Return the bytes of a tensor that are read at `version`: every n-th block, and the bytes after the last whole
    block."""
    turns = num_turns(flat.numel())
    if turns == 1:
        return flat
    num_blocks = flat.numel() // BLOCK_BYTES
    whole, rest = flat.split([num_blocks * BLOCK_BYTES, flat.numel() - num_blocks * BLOCK_BYTES])
    blocks = whole.view(num_blocks, BLOCK_BYTES)[version % turns :: turns].reshape(-1)
    return torch.cat([blocks, rest]) if rest.numel() else blocks


def _compute_hash(header: bytes, parts: Iterable[torch.Tensor]) -> int:
    state = xxhash.xxh3_64(header)
    for part in parts:
        state.update(part.numpy().data)
    return state.intdigest() >> 1  # fits a signed 64-bit integer


def some_of(names: Collection[str]) -> str:
    """Return the first names, and the number of further names."""
    more = len(names) - _MOST_NAMED
    return ", ".join(islice(names, _MOST_NAMED)) + (f" and {more} more" if more > 0 else "")
