"""Tasks from a file of dataset rows."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from skyrl_gym.arrow_nulls import remove_null_fields
from skyrl_gym.check import examples_of, spec_of
from skyrl_gym.envs.base_text_env import ConversationType, Example
from skyrl_gym.error import Error, TaskError


def read_tasks(env: str, data: Path | None, limit: int | None = None) -> tuple[list[Example], str]:
    """Read tasks. Returns the tasks and a digest of their content.

    Raises:
        FileNotFoundError: the file does not exist.
        TaskError: a row is no task; the text names file and row.
        Error: the file type is unknown, its reader is not installed, or the file has no tasks.
    """
    if data is None:
        tasks = examples_of(spec_of(env))
        if not tasks:
            raise Error(f"--data is required: {env} has no examples")
        content = repr([(task.prompt, task.extras) for task in tasks]).encode()
        return tasks[:limit], f"examples {hashlib.sha256(content).hexdigest()}"
    if not data.is_file():
        raise FileNotFoundError(f"--data: no such file {data}")
    tasks = []
    for number, row in enumerate(read_rows(data)):
        if limit is not None and number >= limit:
            break
        tasks.append(_make_task(row, f"{data}, row {number}"))
    if not tasks:
        raise Error(f"--data: {data} has no rows")
    return tasks, hashlib.sha256(data.read_bytes()).hexdigest()


def read_rows(path: Path) -> Iterator[object]:
    """Yield the rows of a .parquet, .jsonl or .json file; .json holds a list, or a row a line.

    Raises:
        TaskError: the content is not JSON.
        Error: the file's kind is unknown, or its reader is not installed.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _read_parquet_rows(path)
    elif name.endswith((".jsonl", ".json")):
        with _open_file(path) as lines:
            if name.endswith(".json") and (text := lines.read()).lstrip().startswith("["):
                yield from _parse_line(text, str(path))
                return
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}, line {number}")
    else:
        raise Error(f"--data must be .parquet, .jsonl or .json (or .gz of the last two); got {path}")


def _open_file(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _parse_line(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as failure:
        raise TaskError(f"{where}: not JSON: {failure}") from failure


def _read_parquet_rows(path: Path) -> Iterator[object]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise Error(
            f"--data {path}: reading parquet needs pyarrow (`pip install pyarrow`); .jsonl does not need it"
        ) from missing
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000):
        for row in batch.to_pylist():
            yield remove_null_fields(row)


def _make_task(row: object, where: str) -> Example:
    if not isinstance(row, dict) or not row.get("prompt"):
        raise TaskError(f"{where}: a row needs a column `prompt`; got {row!r:.200}")
    prompt: ConversationType | str = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise TaskError(f"{where}: prompt must be a list of chat messages or a text; got {prompt!r:.200}")
    return Example(prompt=prompt, extras={name: row[name] for name in row if name != "prompt"}, oracle=[])
