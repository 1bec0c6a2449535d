"""Columns of tokens as text of few bytes."""

import math

import numpy as np
import pytest

from skyrl_train.utils.token_columns import decode_columns, encode_columns


def test_columns_round_trip_with_precision_and_missing_values():
    log_probs = [-0.12345678, math.nan, -1e-7, -math.inf]
    row = encode_columns(
        {
            "trainer_log_probs": np.array(log_probs, dtype=np.float32),
            "entropies": np.array([1.5, math.nan, 0.25, 1e9]),
            "trained": np.array([True, False, True, False]),
        }
    )
    assert all(isinstance(text, str) for text in row.values())
    assert sum(map(len, row.values())) == 24 + 12 + 8  # of 4 tokens
    found = decode_columns(row)
    assert found["trainer_log_probs"] == [pytest.approx(-0.12345678, rel=1e-7), None, pytest.approx(-1e-7), None]
    assert found["entropies"] == [1.5, None, 0.25, None]  # 1e9 is beyond float16
    assert found["trained"] == [1, 0, 1, 0]


@pytest.mark.parametrize("text", ["no base64!", "AAAAAA==", 7, None])  # 4 bytes are no whole number of 8
def test_corrupt_column_is_skipped(text: object):
    good = encode_columns({"advantages": np.array([0.5])})
    assert decode_columns({**good, "trainer_log_probs": text, "uid": "a"}).keys() - {"trainer_log_probs"} == {
        "advantages"
    }
    assert decode_columns({"trainer_log_probs": "AAA="}) == {}  # 2 bytes of a number of 4
