"""Folder of one run: its layout, and crash-safe writing.

    config.yaml                          the resolved configuration of the newest start
    config_1.yaml …                      configurations of earlier starts that differ, the oldest first
    starts.jsonl                         provenance of each start: versions, machine, data, tokenizer, environments
    metrics.jsonl                        one JSON object per line: step, time (Unix seconds), and the metrics
    diagnostics.jsonl                    failures of training that the metrics show, one JSON object each
    fingerprints.jsonl                   hashes of each step's batch and of the weights after it
    trajectories/train_step_000012.jsonl one readable JSON object per trajectory
    trajectories/train_step_000012_tokens.jsonl
                                         per-token training values, line by line (`token_columns`)
    trajectories/eval_step_000010.jsonl  any of these ends in .gz if it is compressed
    rollouts/journal.jsonl               finished groups that are not trained yet (asynchronous training)
    rollouts/timeline.jsonl              generation times of samples (asynchronous training: groups) and concurrent
                                         trainer phases, one JSON object per step
    logs/<process>.log                   output of a process
    owner.lock  owner.json               the running driver (`run_owner`)
    waits/  explanations/                what each process waits for, and explanations of hangs (`explanations`)
    ckpts/  exports/                     written by other modules

Knows neither trainer nor generator: rows are dictionaries.
"""

import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from loguru import logger

from skyrl_gym.whole_folders import fsync_folder
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.types import JsonObject
from skyrl_train.utils.io import add_path_to_errors, expand_path, remove_leftovers, write_atomically

Phase = Literal["train", "eval"]
TRAJECTORIES_NAME = re.compile(r"(train|eval)_step_(\d+)\.jsonl(\.gz)?")
COMPRESSED = ".gz"
"""Suffix of compressed files."""
UNREADABLE = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of reading a corrupt compressed file."""


def get_token_columns_name(step: int) -> str:
    """Return the name of the file of per-token training values of a step."""
    return f"train_step_{step:06d}_tokens.jsonl"


def link_logs(run_folder: "RunFolder", target: Path) -> None:
    """Make the run's log folder a link to `target`, which is created if needed.

    Raises:
        ConfigError: the run has logs elsewhere.
    """
    link = run_folder.logs_folder
    target.mkdir(parents=True, exist_ok=True)
    if link.exists() and link.resolve() == target.resolve():
        return
    if link.exists():
        raise ConfigError(
            f"trainer.log_path: the logs of this run are in {link.resolve()} already and cannot move to {target}; "
            "keep trainer.log_path unchanged, or set another trainer.run_name"
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # a link whose target was deleted
    link.symlink_to(target)


class TrajectoryFile(NamedTuple):
    """The trajectories of one step and phase."""

    step: int
    phase: Phase
    path: Path


class RunFolder:
    """Folder of a run. Construction does not touch the disk; writing creates the needed folders."""

    def __init__(self, path: str | Path, *, compress: bool = False):
        """Resolve the path.

        Args:
            compress: write trajectories and per-token training values with gzip. Both kinds of files are read, and one
                replaces the other.

        Raises:
            ConfigError: the path names an object store.
        """
        self.path = expand_path(path)
        self._compress = compress
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def starts_path(self) -> Path:
        """File of the provenance of each start."""
        return self.path / "starts.jsonl"

    @property
    def fingerprints_path(self) -> Path:
        """File of the hashes of each step's batch and weights."""
        return self.path / "fingerprints.jsonl"

    @property
    def diagnostics_path(self) -> Path:
        """File of the failures of training that the metrics show."""
        return self.path / "diagnostics.jsonl"

    @property
    def trajectories_folder(self) -> Path:
        return self.path / "trajectories"

    @property
    def logs_folder(self) -> Path:
        return self.path / "logs"

    @property
    def trackers_folder(self) -> Path:
        """Folder of trackers that keep local files."""
        return self.path / "trackers"

    @property
    def journal_path(self) -> Path:
        """File of finished rollouts that are not trained yet, in asynchronous training."""
        return self.path / "rollouts" / "journal.jsonl"

    @property
    def timeline_path(self) -> Path:
        """File of generation and training times."""
        return self.path / "rollouts" / "timeline.jsonl"

    def log_path(self, process: str) -> Path:
        """Return the log of a process such as `policy_rank_0`."""
        return self.logs_folder / f"{process}.log"

    def trajectories_path(self, step: int, phase: Phase) -> Path:
        """Return the trajectory file of a step: the existing one, else the uncompressed one."""
        return _find_existing(self.trajectories_folder / f"{phase}_step_{step:06d}.jsonl")

    def token_columns_path(self, step: int) -> Path:
        """Return the file of per-token training values of a step: the existing one, else the uncompressed one."""
        return _find_existing(self.trajectories_folder / get_token_columns_name(step))

    def write_config(self, text: str) -> None:
        """Write the resolved configuration, as YAML text. An earlier one that differs is kept as `config_N.yaml`."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.config_path.exists() and self.config_path.read_text() != text:
            number = next(n for n in itertools.count(1) if not (self.path / f"config_{n}.yaml").exists())
            shutil.copy2(self.config_path, self.path / f"config_{number}.yaml")
        write_atomically(self.config_path, text)

    def append_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append one line, durably.

        Values are numbers (also NumPy's and torch's), strings, booleans or None. Non-finite numbers become null, with a
        warning once per metric.

        Raises:
            ValueError: a metric is named `step` or `time`.
            TypeError: a value of another type.
        """
        if taken := {"step", "time"} & metrics.keys():
            raise ValueError(f"metrics must not be named {sorted(taken)}: these names are reserved")
        values = {name: self._replace_non_finite(name, _to_plain_value(name, value)) for name, value in metrics.items()}
        _append_line(self.metrics_path, _format_json_line({"step": int(step), "time": round(time.time(), 3)} | values))

    def append_start(self, step: int, record: JsonObject) -> None:
        """Append the provenance of a start, with a hash of its configuration. Args: `step`, the last completed one."""
        config = {"config": compute_config_hash(self.config_path.read_bytes())} if self.config_path.exists() else {}
        _append_line(
            self.starts_path, _format_json_line({"step": step, "time": round(time.time(), 3)} | config | record)
        )

    def append_fingerprints(self, step: int, record: JsonObject) -> None:
        """Append the hashes of a step."""
        _append_line(self.fingerprints_path, _format_json_line({"step": step} | record))

    def append_diagnostic(self, step: int, record: JsonObject) -> None:
        """Append a failure of training that the metrics show."""
        _append_line(self.diagnostics_path, _format_json_line({"step": step, "time": round(time.time(), 3)} | record))

    def read_diagnostics(self) -> Iterator[JsonObject]:
        """Yield the records of `append_diagnostic`, oldest first; none if the file is missing."""
        if self.diagnostics_path.exists():
            yield from (row for _, row in read_json_lines(self.diagnostics_path))

    def append_timeline(self, step: int, record: JsonObject) -> None:
        """Append the timeline of a step, durably."""
        _append_line(self.timeline_path, _format_json_line({"step": step} | record))

    def read_timeline(self) -> Iterator[JsonObject]:
        """Yield the records of `append_timeline`, oldest first; none if the file is missing."""
        if self.timeline_path.exists():
            yield from (row for _, row in read_json_lines(self.timeline_path))

    def read_metrics(self) -> list[JsonObject]:
        """Return every line of `metrics.jsonl`, oldest first, without a torn last line (of a process killed or writing
        now).

        Raises:
            DataError: a line before the last is not JSON.
        """
        if not self.metrics_path.exists():
            return []
        return [row for _, row in read_json_lines(self.metrics_path)]

    def write_trajectories(self, step: int, phase: Phase, rows: Iterable[Mapping[str, object]]) -> None:
        """Write the trajectories of a step, atomically; an earlier file of the same step and phase is replaced."""
        self._write_lines(f"{phase}_step_{step:06d}.jsonl", map(self._format_trajectory, rows))

    def write_token_columns(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Write per-token training values of a step, one line per trajectory; atomically."""
        self._write_lines(get_token_columns_name(step), map(_format_json_line, rows))

    def _write_lines(self, name: str, lines: Iterable[bytes]) -> None:
        """Write a file of trajectories, and remove its compressed or uncompressed counterpart."""
        path, content = self.trajectories_folder / name, b"".join(lines)
        kinds = [path, path.with_name(name + COMPRESSED)]
        written, other = reversed(kinds) if self._compress else kinds
        self.trajectories_folder.mkdir(parents=True, exist_ok=True)
        # Without a time stamp, equal trajectories give equal files. Level 6 is four times as slow for a tenth less.
        write_atomically(written, gzip.compress(content, 1, mtime=0) if self._compress else content)
        other.unlink(missing_ok=True)

    def _format_trajectory(self, row: Mapping[str, object]) -> bytes:
        try:
            return _format_json_line(row)
        except ValueError:  # a non-finite number: checking every row for one costs more than writing it
            return _format_json_line(self._replace_non_finite("trajectories", row))

    def read_trajectories(self, step: int, phase: Phase) -> list[JsonObject]:
        """Return the rows of a step.

        Raises:
            FileNotFoundError: the step and phase have no file.
            DataError: a line is not JSON.
        """
        return [row for _, row in read_json_lines(self.trajectories_path(step, phase))]

    def list_trajectory_files(self) -> list[TrajectoryFile]:
        """Return all trajectory files, by step."""
        names = (TRAJECTORIES_NAME.fullmatch(path.name) for path in self.trajectories_folder.glob("*.jsonl*"))
        found: set[tuple[int, Phase]] = {
            (int(name[2]), "train" if name[1] == "train" else "eval") for name in names if name
        }
        return [TrajectoryFile(*file, self.trajectories_path(*file)) for file in sorted(found)]

    def delete_oldest_trajectories(self, max_bytes: int) -> None:
        """Delete the trajectories of the oldest training steps until the rest is at most `max_bytes` or a
        single step.
        """
        files = [file for file in self.list_trajectory_files() if file.phase == "train"]
        size = 0
        for newer, file in enumerate(reversed(files)):
            columns = self.token_columns_path(file.step)
            size += file.path.stat().st_size + (columns.stat().st_size if columns.exists() else 0)
            if newer and size > max_bytes:
                columns.unlink(missing_ok=True)
                file.path.unlink()

    def delete_after(self, step: int) -> None:
        """Delete everything after a step, for a run that resumes there and writes those steps again.

        If killed in between, calling it again completes the work.
        """
        for path in (
            self.metrics_path,
            self.timeline_path,
            self.starts_path,
            self.fingerprints_path,
            self.diagnostics_path,
        ):
            if path.exists():
                kept = (line for line, row in read_json_lines(path) if row["step"] <= step)
                write_atomically(path, b"".join(kept))
                remove_leftovers(path.parent)
        if self.trajectories_folder.exists():
            for path in self.trajectories_folder.glob("*.jsonl*"):
                name = TRAJECTORIES_NAME.fullmatch(path.name)
                if name and int(name[2]) > step:
                    self.token_columns_path(int(name[2])).unlink(missing_ok=True)
                    path.unlink()
            remove_leftovers(self.trajectories_folder)
            fsync_folder(self.trajectories_folder)

    def _replace_non_finite(self, name: str, value: object) -> Any:
        """Replace non-finite numbers by null, with a warning once per name."""
        found = replace_non_finite(value)
        if found is not value and name not in self._warned:
            self._warned.add(name)
            logger.warning(f"{name} is not a finite number and is written as null (reported once)")
        return found


def _find_existing(path: Path) -> Path:
    """Return this file, or its compressed form if that exists."""
    compressed = path.with_name(path.name + COMPRESSED)
    return compressed if compressed.exists() else path


def compute_config_hash(text: bytes) -> str:
    """Return the hash that identifies a start's configuration."""
    return hashlib.sha256(text).hexdigest()[:12]


def _append_line(path: Path, line: bytes) -> None:
    """Append a line durably, after the last complete line."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with add_path_to_errors(path), open(path, "a+b") as file:
        remove_torn_line(file)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync_folder(path.parent)


def _format_json_line(row: Mapping[str, object]) -> bytes:
    """Format one line of JSON. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _to_plain_value(name: str, value: object) -> object:
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if callable(item := getattr(value, "item", None)):  # a NumPy scalar, a 0-d array or tensor
        return item()
    raise TypeError(f"metric {name} must be a number, a string, a boolean or None; got {type(value).__name__}")


def replace_non_finite(value: object) -> object:
    """Return the same object if all its numbers are finite, else a copy with null for non-finite ones."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = {key: replace_non_finite(item) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if isinstance(value, list | tuple):
        items = [replace_non_finite(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def remove_torn_line(file: BinaryIO | FileIO) -> None:
    """Remove an incomplete last line, which would corrupt the next."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)


def read_json_lines(path: Path) -> Iterator[tuple[bytes, JsonObject]]:
    """Yield the lines of a file of JSON objects with their parsed content, without a torn last line.

    Splits at line feeds only: JSON text may contain other line separators.
    """
    with gzip.open(path) if path.suffix == COMPRESSED else open(path, "rb") as file:
        for number, line in enumerate(_iter_lines(path, file), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield line, json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON ({error}): {line[:80]!r}; remove it to continue"
                ) from error


def _iter_lines(path: Path, file: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except UNREADABLE as error:
        raise DataError(f"{path} is damaged ({error}); remove it to continue") from error
