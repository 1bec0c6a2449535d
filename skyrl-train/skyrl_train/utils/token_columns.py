"""Compact encoding of numbers per response token: bytes of an array in base64.

Written next to trajectories after they are trained, one line per row: `uid` and the columns by name. Read by the
dashboard and by comparisons of runs. Knows neither torch nor run folders.
"""

import base64
from collections.abc import Mapping

import numpy as np

from skyrl_train.types import JsonObject

KINDS = {"trainer_log_probs": "<f4", "entropies": "<f2", "advantages": "<f2", "trained": "|u1"}
_DIGITS = {"<f4": 8, "<f2": 4}
"""Significant digits by number type. Log-probs are stored in full, because their differences from the engine's are
often smaller than float16 can resolve. NaN: unknown."""


def encode_columns(columns: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Encode columns (of `KINDS`, one number per token) as text."""
    with np.errstate(over="ignore"):  # beyond float16 is infinite, which is decoded as unknown
        arrays = {name: np.ascontiguousarray(values, dtype=KINDS[name]) for name, values in columns.items()}
    return {name: base64.b64encode(values.tobytes()).decode("ascii") for name, values in arrays.items()}


def decode_columns(row: JsonObject) -> dict[str, list[float | None]]:
    """Decode the columns of a line, None for unknown numbers. A corrupt column is skipped."""
    found: dict[str, list[float | None]] = {}
    for name, kind in KINDS.items():
        text = row.get(name)
        if not isinstance(text, str):
            continue
        try:
            values = np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
        except ValueError:  # not base64, or a partial number
            continue
        found[name] = values.tolist() if kind == "|u1" else _round_numbers(values, _DIGITS[kind])
    return found


def _round_numbers(values: np.ndarray, digits: int) -> list[float | None]:
    """Round numbers to the given significant digits; None for non-finite ones."""
    known = np.isfinite(values)
    doubles = np.where(known, values, 0.0).astype(np.float64)
    magnitude = np.floor(np.log10(np.maximum(np.abs(doubles), 1e-40)))
    scale = 10.0 ** (digits - 1 - magnitude)
    numbers: list[float | None] = (np.round(doubles * scale) / scale).tolist()
    for index in np.flatnonzero(~known).tolist():
        numbers[index] = None
    return numbers
