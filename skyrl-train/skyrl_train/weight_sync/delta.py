"""Lossless, compact encoding of changes between two versions of a tensor.

After a small step most numbers of a low-precision model are unchanged, and the others differ by one or two units in the
last place. If few changed, the encoding has the gaps between changed positions, one byte each, and the differences of
their bits as integers; otherwise the differences of all numbers. Differences are encoded with the sign last (0, -1, 1,
-2, 2 become 0, 1, 2, 3, 4), all low bytes before all high bytes, which compress to almost nothing. Measured on a first
Adam step at learning rate 1e-6 in bfloat16: 4.2 % of the numbers changed, 2.3 % of the bytes.
"""

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from skyrl_train.errors import WeightSyncError

Integers = np.ndarray
"""A tensor's elements as signed integers of their size, one dimension."""

CHUNK_ELEMENTS = 1 << 20
"""Encoded together: bounds what encoding needs besides the tensor."""
_DENSE_FROM = 1 / 6  # fraction of changed elements above which their positions cost more than the zeros of the others
_UNCHANGED, _SPARSE, _DENSE = range(3)
_HEADER = struct.Struct("<B4I")  # kind, changed elements, bytes of gaps, compressed bytes of gaps and of differences
_ESCAPE = 255  # in gaps: advance by this number and read the next byte


def encode(new: Integers, base: Integers) -> Iterator[bytes]:
    """Encode the change from `base` to `new`, in pieces."""
    for start in range(0, len(new), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        yield from _encode_chunk(new[part], base[part])


def apply(payload: memoryview, base: Integers) -> int:
    """Apply an encoded change to `base` in place, which then equals the `new` of `encode`. Returns the number of bytes
    read.

    Raises:
        WeightSyncError: the payload does not match the tensor.
    """
    position = 0
    for start in range(0, len(base), CHUNK_ELEMENTS):
        position += _apply_chunk(payload[position:], base[start : start + CHUNK_ELEMENTS])
    return position


def _encode_chunk(new: Integers, base: Integers) -> Iterator[bytes]:
    differs = new != base
    num_changed = int(np.count_nonzero(differs))
    if num_changed == 0:
        yield _HEADER.pack(_UNCHANGED, 0, 0, 0, 0)
        return
    if num_changed > _DENSE_FROM * len(new):
        kind, gaps, differences = _DENSE, np.empty(0, dtype=np.uint8), new - base
    else:
        changed = np.flatnonzero(differs)
        kind, gaps, differences = _SPARSE, _encode_gaps(changed), new[changed] - base[changed]
    small_gaps, small_differences = _compress(gaps), _compress(_encode_planes(differences))
    yield _HEADER.pack(kind, num_changed, len(gaps), len(small_gaps), len(small_differences))
    yield small_gaps
    yield small_differences


def _apply_chunk(payload: memoryview, base: Integers) -> int:
    try:
        kind, num_changed, num_gaps, small_gaps, small_differences = _HEADER.unpack_from(payload)
        gaps_end = _HEADER.size + small_gaps
        end = gaps_end + small_differences
        if kind == _UNCHANGED:
            return end
        count = len(base) if kind == _DENSE else num_changed
        differences = _decode_planes(_decompress(payload[gaps_end:end], count * base.itemsize), base.dtype)
        if kind == _DENSE:
            base += differences
        else:
            base[_decode_gaps(_decompress(payload[_HEADER.size : gaps_end], num_gaps))] += differences
    except (struct.error, OSError, ValueError, IndexError) as error:  # pyarrow's errors are OSError and ValueError
        raise WeightSyncError(f"changes of weights cannot be decoded: {error}") from error
    return end


def _encode_gaps(positions: np.ndarray) -> np.ndarray:
    """Return the distance of each position to the previous one (of the first to -1), as bytes with escapes."""
    gaps = np.diff(positions, prepend=-1)
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes + 1) - 1
    written = np.full(ends[-1] + 1, _ESCAPE, dtype=np.uint8)
    written[ends] = gaps - escapes * _ESCAPE
    return written


def _decode_gaps(gaps: np.ndarray) -> np.ndarray:
    """Decode `_encode_gaps`."""
    reached = np.cumsum(gaps, dtype=np.int64)
    return reached[gaps != _ESCAPE] - 1


def _encode_planes(differences: Integers) -> np.ndarray:
    """Order the bytes of the differences by significance, lowest first, with their sign last."""
    bits = differences.itemsize * 8
    sign_last = (differences << 1) ^ (differences >> (bits - 1))
    return np.ascontiguousarray(sign_last.view(np.uint8).reshape(-1, differences.itemsize).T)


def _decode_planes(planes: np.ndarray, dtype: np.dtype) -> Integers:
    """Decode `_encode_planes`."""
    sign_last = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(f"u{dtype.itemsize}").reshape(-1)
    return ((sign_last >> 1) ^ -(sign_last & 1)).view(dtype)


def _compress(values: np.ndarray) -> bytes:
    return _create_codec().compress(np.ravel(values), asbytes=True)


def _decompress(values: memoryview, num_bytes: int) -> np.ndarray:
    return np.frombuffer(_create_codec().decompress(pa.py_buffer(values), num_bytes), dtype=np.uint8)


def _create_codec() -> pa.Codec:
    """Return a new codec for each call (0.2 microseconds), since thread safety is not documented."""
    return pa.Codec("zstd", compression_level=1)
