"""Conversion of wire tensors (protobuf and JSON) to and from numpy arrays. `field` is the tensor's name in errors. No
loops over elements.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import msgspec
import numpy as np

from tx.errors import RequestError
from tx.tinker.chunked_lists import to_array
from tx.tinker.wire import tinker_wire_pb2 as pb

MAX_DENSE_ELEMENTS = 2**25
"""Maximum number of elements of a request's sparse tensors in dense form: a small body must not become gigabytes."""

_NAMES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4", pb.DTYPE_BFLOAT16: "<u2"}


class JsonTensor(msgspec.Struct, forbid_unknown_fields=True):
    """`TensorData` of the SDK."""

    data: list[int | float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TensorReader:
    """Decoder of the tensors of one request, with a limit on their total size.

    What it gives are writable arrays of int64 or float32: the narrower types of the wire are widened, sparse tensors
    made dense. Everything raises RequestError where bytes, shape and type do not belong together.
    """

    def __init__(self) -> None:
        self._dense_left = MAX_DENSE_ELEMENTS

    def read(self, tensor: pb.Tensor, field: str) -> np.ndarray:
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise RequestError(f"{field}.dtype must be FLOAT32, INT64, INT32 or BFLOAT16; got {tensor.dtype}")
        shape = list(tensor.shape)
        if tensor.WhichOneof("encoding") != "sparse_csr":
            return _validate_shape(_convert_to_wide(_from_bytes(tensor.dense, dtype, field)), shape, field)
        csr = tensor.sparse_csr
        return self._to_dense(
            _convert_to_wide(_from_bytes(csr.values, dtype, f"{field}.values")),
            _from_bytes(csr.crow_indices, "<i8", f"{field}.crow_indices"),
            _from_bytes(csr.col_indices, "<i8", f"{field}.col_indices"),
            shape,
            field,
        )

    def read_json(self, tensor: JsonTensor, field: str) -> np.ndarray:
        values = _from_numbers(tensor.data, tensor.dtype, f"{field}.data")
        crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
        if crow is None and col is None:
            return _validate_shape(values, tensor.shape or [], field)
        if crow is None or col is None:
            raise RequestError(f"{field}: sparse_crow_indices and sparse_col_indices must be set together")
        return self._to_dense(
            values,
            _from_numbers(crow, "int64", f"{field}.sparse_crow_indices"),
            _from_numbers(col, "int64", f"{field}.sparse_col_indices"),
            tensor.shape or [],
            field,
        )

    def _to_dense(
        self, values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: list[int], field: str
    ) -> np.ndarray:
        """Expand a CSR tensor to [rows, columns], zero where not listed."""
        if len(shape) != 2 or min(shape) < 0:
            raise RequestError(f"{field}.shape must be [rows, columns] for a sparse tensor; got {shape[:8]}")
        self._dense_left -= prod(shape)
        if self._dense_left < 0:
            raise RequestError(
                f"{field}.shape: the sparse tensors of a request must hold at most {MAX_DENSE_ELEMENTS} numbers in "
                f"dense form; this one has shape {shape}"
            )
        counts = np.diff(crow)
        if crow.size != shape[0] + 1 or crow[0] != 0 or crow[-1] != values.size or (counts < 0).any():
            raise RequestError(
                f"{field}: the row pointers must be {shape[0] + 1} numbers increasing from 0 to the number of values, "
                f"{values.size}"
            )
        if col.size != values.size or (col.size and (col.min() < 0 or col.max() >= shape[1])):
            raise RequestError(f"{field}: the column indices must be {values.size} numbers from 0 to {shape[1] - 1}")
        dense = np.zeros(shape, values.dtype)
        dense[np.repeat(np.arange(shape[0]), counts), col] = values
        return dense


def write_tensor(array: np.ndarray, tensor: pb.Tensor) -> None:
    """Encode an int64 or float32 array of any shape as a dense tensor."""
    tensor.dtype = pb.DTYPE_INT64 if array.dtype.kind == "i" else pb.DTYPE_FLOAT32
    tensor.dense = np.ascontiguousarray(array, "<i8" if array.dtype.kind == "i" else "<f4").tobytes()
    tensor.shape.extend(array.shape)


def read_tokens(data: bytes, field: str) -> np.ndarray:
    """[N] int64 from int32 bytes."""
    return _from_bytes(data, "<i4", field).astype(np.int64)


def read_json_tokens(tokens: list[int], field: str) -> np.ndarray:
    """[N] int64, of 32 bits as the wire has them."""
    array = _from_numbers(tokens, "int64", field)
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise RequestError(f"{field} must be integers of 32 bits")
    return array


def _from_bytes(data: bytes, dtype: str, field: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise RequestError(f"{field} must be numbers of {size} bytes each; got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _from_numbers(numbers: Sequence[int | float], dtype: str, field: str) -> np.ndarray:
    if dtype == "float32":
        try:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused with the rest
                return to_array(numbers).astype(np.float64).astype(np.float32)
        except OverflowError:
            raise RequestError(f"{field} must be numbers that float32 can hold") from None
    try:
        array = to_array(numbers)
        with np.errstate(invalid="ignore"):  # of what int64 cannot hold something else becomes, as is seen below
            whole = array.astype(np.int64) if array.size else np.zeros(0, np.int64)
    except (OverflowError, TypeError, ValueError):
        raise RequestError(f"{field} must be integers of 64 bits") from None
    if array.dtype.kind != "i" and not np.array_equal(array, whole):
        raise RequestError(f"{field} must be integers of 64 bits to match its dtype")
    return whole


def _convert_to_wide(array: np.ndarray) -> np.ndarray:
    """Return a wider copy: float32 for bfloat16 (its upper half), int64 for int32."""
    match array.dtype.str:
        case "<u2":
            return (array.astype(np.uint32) << 16).view(np.float32)
        case "<i4":
            return array.astype(np.int64)
        case _:
            return array.copy()


def _validate_shape(array: np.ndarray, shape: list[int], field: str) -> np.ndarray:
    if not shape:
        return array
    if min(shape) < 0 or len(shape) > 8 or prod(shape) != array.size:
        raise RequestError(f"{field}.shape must have {array.size} elements, the number of values; got {shape[:8]}")
    return array.reshape(shape)
