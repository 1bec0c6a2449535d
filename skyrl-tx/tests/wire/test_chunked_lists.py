"""Long lists of numbers: divided, they are what they are whole."""

import numpy as np
import orjson
import pytest

from tx.errors import RequestError
from tx.tinker import chunked_lists
from tx.tinker.wire.tensors import JsonTensor, TensorReader

LISTS = [[], [3], [-1, 5, 2**40, 7], [0.5, -3.0, 1e-9], [1, 2, 3, 4.5], [2**70, 1, 1]]


@pytest.mark.parametrize("numbers", LISTS, ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_divided_lists_are_converted_like_whole_ones(numbers, size, monkeypatch):
    value = {"a": {"data": numbers, "shape": [len(numbers)]}, "texts": ["x"] * 5, "rows": [[1, 2], None, [3]], "b": 1}
    whole, values = np.asarray(numbers), np.asarray(numbers, np.float32)
    monkeypatch.setattr(chunked_lists, "CHUNK", size)
    array = chunked_lists.to_array(numbers)
    assert np.array_equal(array, whole) and (array.dtype == whole.dtype or 2**70 in numbers)
    assert chunked_lists.list_of(values) == values.tolist()
    if 2**70 not in numbers:
        assert orjson.loads(chunked_lists.encode_json(value)) == value and chunked_lists.encode_json(
            value
        ) == orjson.dumps(value)


def test_long_list_is_converted_in_bounded_chunks(monkeypatch):
    sizes = []

    def asarray(numbers, *args):
        sizes.append(len(numbers))
        return np.array(numbers, *args)

    monkeypatch.setattr(chunked_lists.np, "asarray", asarray)
    data: list[int | float] = [7] * (3 * chunked_lists.CHUNK + 1)
    TensorReader().read_json(JsonTensor(data=data, dtype="int64"), "data")
    assert sizes == [chunked_lists.CHUNK] * 3 + [1]
    with pytest.raises(RequestError, match="integers of 64 bits"):
        TensorReader().read_json(JsonTensor(data=[*data, 0.5], dtype="int64"), "data")
