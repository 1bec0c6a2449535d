"""Engine side of the encoding `delta`: reconstructs whole tensors from the previous tensors and the changes.

It yields every tensor of the model, changed or not: loaders expect whole tensors and layers, copying is cheap compared
with decoding, and weight verification then covers the whole model.
"""

import torch
import xxhash

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightUpdateRequest
from skyrl_train.weight_sync.delta import apply
from skyrl_train.weight_sync.last_weights import LastWeights
from skyrl_train.weight_sync.payload import Bucket, Buffer, bytes_of, integers_of, split_bytes

DIGEST_BYTES = 8
"""Size of the hash of all preceding bytes at the end of a bucket of changes. An undetected wrong bit would stay wrong
in all later versions."""

_ALIGNMENT = 16


class DeltaDecoder:
    """Decoder of delta updates. Stores the last weights in a file of `directory`."""

    def __init__(self, directory: str):
        self._last = LastWeights(directory)
        self._buffer = Buffer(torch.device("cpu"))
        self._base_version: int | None = None

    def receive(self, request: WeightUpdateRequest, flat: torch.Tensor) -> Bucket:
        """Decode the bucket's tensors on the host. `flat`: its payload, deltas or whole tensors.

        Raises:
            WeightSyncError: the base version of the deltas is missing, or the payload was altered.
        """
        if request.index == 0:
            # From here on the file mixes two versions: an interrupted update leaves None, and the trainer then sends
            # whole tensors.
            self._base_version, self._last.version = self._last.version, None
        if request.base_version is None:
            bucket = split_bytes(request, flat)
            for (name, tensor), dtype, shape in zip(bucket, request.dtypes, request.shapes, strict=True):
                self._last.write(name, dtype, shape, bytes_of(tensor).cpu())
            return bucket
        kinds = list(zip(request.names, request.dtypes, request.shapes, strict=True))
        if request.base_version != self._base_version or not all(self._last.knows(*kind) for kind in kinds):
            raise WeightSyncError(
                f"changes to version {request.base_version} came to an engine that holds version {self._base_version}; "
                "send whole tensors"
            )
        changes = _verify_changes(request, flat)
        bucket: Bucket = []
        # One buffer, reused for the next bucket, since a bucket's tensors are consumed before the next is received.
        room = self._buffer.first(sum(_prepare_buffer(self._last.num_bytes(name)) for name in request.names))
        for name, dtype, shape in kinds:
            num_bytes = self._last.num_bytes(name)
            tensor, room = room[:num_bytes], room[_prepare_buffer(num_bytes) :]
            self._last.read(name, tensor)
            # The differences are added in place; `apply` returns the end of this tensor's changes.
            changes = changes[apply(changes, integers_of(tensor, dtype)) :]
            self._last.write(name, dtype, shape, tensor)
            bucket.append((name, tensor.view(getattr(torch, dtype)).view(shape)))
        if changes:
            raise WeightSyncError(
                f"bucket {request.index} of version {request.version} has {len(changes)} bytes too many"
            )
        return bucket

    def finish(self, version: int) -> None:
        """Record that all tensors have `version`."""
        self._last.version = version

    def close(self) -> None:
        self._last.close()


def _prepare_buffer(num_bytes: int) -> int:
    """Return a buffer of this many bytes and the alignment of the next tensor."""
    # A tensor of a wider dtype may follow, whose view needs an aligned start.
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _verify_changes(request: WeightUpdateRequest, flat: torch.Tensor) -> memoryview:
    """Return the encoded changes after verifying their checksum.

    Raises:
        WeightSyncError: they were altered.
    """
    payload = flat.cpu().numpy().data
    changes, digest = payload[:-DIGEST_BYTES], payload[-DIGEST_BYTES:]
    # The hash is checked first, since an applied change cannot be reverted.
    if len(payload) != request.num_bytes or xxhash.xxh3_64_digest(changes) != digest:
        raise WeightSyncError(
            f"the changes in bucket {request.index} of version {request.version} ({request.names[0]} to "
            f"{request.names[-1]}) were altered on their way"
        )
    return changes
