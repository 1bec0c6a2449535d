"""Buckets of parameters, and their conversion to bytes and back. Independent of transports."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import BytesLocation, WeightSyncInitInfo, WeightUpdateRequest

NamedTensor = tuple[str, torch.Tensor]
Bucket = list[NamedTensor]
"""Named tensors that travel together."""

MOST_BYTES_ON_THE_WAY = 1 << 26
"""Maximum size of one bucket in host memory or a network. Larger buckets only delay the engines' first one; smaller
ones cost more calls."""
_SLOTS_IN_MEMORY = 4  # two slots besides the bucket being gathered should be small in comparison


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in row-major order [num_bytes] uint8: a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def integers_of(flat: torch.Tensor, dtype: str) -> np.ndarray:
    """View a tensor's bytes on the host as signed integers of the element size."""
    return flat.numpy().view(f"i{getattr(torch, dtype).itemsize}")


def num_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the number of bytes of a tensor with this torch dtype (by name) and shape."""
    return math.prod(shape) * getattr(torch, dtype).itemsize


class Buffer:
    """Reusable memory for one bucket: allocating new pages costs more than the copy."""

    def __init__(self, device: torch.device):
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def first(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes [num_bytes] uint8, growing the buffer if necessary."""
        if num_bytes > self._bytes.numel():
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self._bytes.device)
        return self._bytes[:num_bytes]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Bucket to send: its description, and its bytes in consecutive pieces.

    Examples:
        >>> payload = Payload.of([("w", torch.zeros(3, dtype=torch.bfloat16)), ("b", torch.ones(1))])
        >>> payload.names, payload.dtypes, payload.shapes, payload.num_bytes
        (['w', 'b'], ['bfloat16', 'float32'], [(3,), (1,)], 10)
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    parts: list[torch.Tensor]
    """uint8, one dimension each."""
    num_bytes: int
    bucket: Bucket = field(default_factory=list)
    """The tensors, if their fingerprints are still to be taken."""
    base_version: int | None = None
    """Base version of a delta, as in `WeightUpdateRequest`."""
    place: BytesLocation = field(default_factory=BytesLocation)
    """Location of bytes that are already in place, as fields of a request; `parts` is then empty."""

    @classmethod
    def of(cls, bucket: Bucket) -> "Payload":
        """Create a payload of whole tensors."""
        parts = [bytes_of(tensor) for _, tensor in bucket]
        return cls(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[tuple(tensor.shape) for _, tensor in bucket],
            parts=parts,
            num_bytes=sum(part.numel() for part in parts),
            bucket=bucket,
        )

    def request(self, *, version: int, index: int, **place: Unpack[BytesLocation]) -> WeightUpdateRequest:
        """Build the request to the engines. `place`: the fields that locate the bytes."""
        return WeightUpdateRequest(
            names=self.names,
            dtypes=self.dtypes,
            shapes=self.shapes,
            version=version,
            index=index,
            num_bytes=self.num_bytes,
            base_version=self.base_version,
            **place,
        )

    def copy_to(self, flat: torch.Tensor) -> None:
        """Write the bytes to the start of `flat` (uint8, one dimension)."""
        start = 0
        for part in self.parts:
            flat[start : start + part.numel()].copy_(part)
            start += part.numel()


def in_buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[Bucket]:
    """Collect consecutive tensors into buckets of at most `max_bytes` (a larger tensor forms its own)."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.itemsize
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


def most_bytes_of(init_info: WeightSyncInitInfo, max_bucket_bytes: int) -> int:
    """Return the maximum bytes of a bucket, equal on every rank."""
    if init_info.transport == "checkpoint":
        return max_bucket_bytes  # files take no memory
    if init_info.transport == "cuda_ipc":
        return max_bucket_bytes // _SLOTS_IN_MEMORY  # copied in a fraction of the time that a call takes
    return min(MOST_BYTES_ON_THE_WAY, max_bucket_bytes // _SLOTS_IN_MEMORY)


def payloads_of(tensors: Iterable[NamedTensor], most_bytes: int) -> Iterator[Payload]:
    """Divide tensors into the buckets to send."""
    return map(Payload.of, in_buckets(tensors, most_bytes))


def check_announced(request: WeightUpdateRequest) -> None:
    """Raise WeightSyncError, before whole tensors are fetched, unless the request declares the number of bytes that
    they need. (Members of a group that expect different lengths would wait for each other.)"""
    needed = sum(map(num_bytes_of, request.dtypes, request.shapes))
    if needed != request.num_bytes:
        raise WeightSyncError(
            f"bucket {request.index} of version {request.version} announces {request.num_bytes} bytes, but its "
            f"{len(request)} tensors need {needed}"
        )


def split_bytes(request: WeightUpdateRequest, flat: torch.Tensor) -> Bucket:
    """Split `flat` (uint8, one dimension) into views: the request's named tensors.

    Raises:
        WeightSyncError: the number of bytes does not match the tensors.
    """
    check_announced(request)
    if flat.numel() != request.num_bytes:
        raise WeightSyncError(
            f"bucket {request.index} of version {request.version} announces {request.num_bytes} bytes, but "
            f"{flat.numel()} came"
        )
    bucket: Bucket = []
    start = 0
    for name, dtype_name, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + num_bytes_of(dtype_name, shape)
        part = flat[start:end]
        if part.storage_offset() % dtype.itemsize:  # a view needs aligned bytes
            part = part.clone()
        bucket.append((name, part.view(dtype).view(shape)))
        start = end
    return bucket
