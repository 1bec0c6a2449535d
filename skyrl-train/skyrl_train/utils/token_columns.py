"""Numbers of each response token as text of few bytes: the bytes of an array in base64.

Written with trajectories once a step has trained them, one line a row: `uid` and the columns by name. Read by the
dashboard and by comparisons of runs. Knows neither torch nor run folders.
"""

import base64
from collections.abc import Mapping

import numpy as np

from skyrl_train.types import JsonObject

KINDS = {"trainer_log_probs": "<f4", "entropies": "<f2", "advantages": "<f2", "trained": "|u1"}
_DIGITS = {"<f4": 8, "<f2": 4}
"""Columns and the types of their numbers. Log-probs have all their digits: their differences from the engine's are
often smaller than float16 can tell. NaN: not known."""


def encode_columns(columns: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return columns (of `KINDS`, one number a token) as text."""
    with np.errstate(over="ignore"):  # beyond float16 is infinite, which is read as not known
        arrays = {name: np.ascontiguousarray(values, dtype=KINDS[name]) for name, values in columns.items()}
    return {name: base64.b64encode(values.tobytes()).decode("ascii") for name, values in arrays.items()}


def decode_columns(row: JsonObject) -> dict[str, list[float | None]]:
    """Return the columns of a line, None for numbers that are not known. A column that is damaged is left out."""
    found: dict[str, list[float | None]] = {}
    for name, kind in KINDS.items():
        text = row.get(name)
        if not isinstance(text, str):
            continue
        try:
            values = np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
        except ValueError:  # no base64, or no whole numbers
            continue
        found[name] = values.tolist() if kind == "|u1" else _rounded(values, _DIGITS[kind])
    return found


def _rounded(values: np.ndarray, digits: int) -> list[float | None]:
    """Return numbers with so many digits, which their type has; None for what is not finite."""
    known = np.isfinite(values)
    doubles = np.where(known, values, 0.0).astype(np.float64)
    magnitude = np.floor(np.log10(np.maximum(np.abs(doubles), 1e-40)))
    scale = 10.0 ** (digits - 1 - magnitude)
    numbers: list[float | None] = (np.round(doubles * scale) / scale).tolist()
    for index in np.flatnonzero(~known).tolist():
        numbers[index] = None
    return numbers
