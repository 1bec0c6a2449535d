"""Rows of a dataset file: .parquet, .jsonl or .json, the last two also gzipped."""

import gzip
import json
from pathlib import Path

from skyrl_agent.errors import ConfigError
from skyrl_agent.types import Row
from skyrl_gym.arrow_nulls import remove_null_fields


def read_rows(path: str | Path) -> list[Row]:
    """Read all rows of a file.

    Raises:
        ConfigError: the file does not exist, is not a table of rows, or is empty.
    """
    file = Path(path).expanduser()
    try:
        rows = _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} must contain a list of JSON objects, or one JSON object per line")
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return [row for row in rows if isinstance(row, dict)]


def _read_parquet(file: Path) -> list[object]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError("reading .parquet needs pyarrow, which is not installed; .jsonl does not need it") from error
    return [remove_null_fields(row) for row in pyarrow.parquet.read_table(file).to_pylist()]


def _read_json(file: Path) -> list[Row]:
    content = file.read_bytes()
    text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    if ".json" in file.suffixes:
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]
