"""Trajectories on disk: one JSON object a line, written as each ends. Several processes may write one file; a kill in
the middle of a line loses only that line.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from skyrl_agent.chat.transitions import TrainingDatum, transitions_to_training_data
from skyrl_agent.types import Failure, JsonObject, Row, SandboxCommand, Tokenizer, ToolCallRecord, TrajectoryResult

logger = logging.getLogger(__name__)


class TrajectoryFile:
    """
    Args:
        path: of the file; its folder is made.
        tokenizer: turns ids into the text that people read.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer) -> None:
        self.path, self.tokenizer = Path(path).expanduser(), tokenizer

    def append(self, result: TrajectoryResult, val_mode: bool = False, position: int | None = None) -> None:
        """Append a row. A disk that is full or unavailable is logged; the trajectory itself is not lost."""
        line = json.dumps(to_record(result, self.tokenizer, val_mode, position), ensure_ascii=False, default=str)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_line(self.path, line.encode("utf-8", "replace"))
        except OSError as error:
            logger.warning("output.trajectories=%s: %s; a trajectory was not written", self.path, error)


def read_records(path: str | Path) -> Iterator[JsonObject]:
    """Read the rows of a file in order. Incomplete rows (a writer was killed) are logged and skipped."""
    with open(Path(path).expanduser(), "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError:
                logger.warning("%s: line %d is not a complete row and is skipped", path, number)


def last_records(path: str | Path) -> dict[tuple[int, int], JsonObject]:
    """Return the last row of each trajectory of a single-batch file, by (position, trajectory id)."""
    records = (record for record in read_records(path) if record.get("position") is not None)
    return {(record["position"], record["trajectory_id"]): record for record in records}


def to_result(record: Row) -> TrajectoryResult:
    """Convert a row back to a result, without `transitions` and `state`."""
    names = {field.name for field in fields(TrajectoryResult)} - {"failure", "tool_calls", "sandbox"}
    failure = record["failure"]
    return TrajectoryResult(
        **{name: value for name, value in record.items() if name in names},
        failure=None if failure is None else Failure(**failure),
        tool_calls=[ToolCallRecord(**call) for call in record["tool_calls"]],
        sandbox=[SandboxCommand(**command) for command in record.get("sandbox", [])],  # missing in earlier releases
    )


def to_record(
    result: TrajectoryResult, tokenizer: Tokenizer, val_mode: bool = False, position: int | None = None
) -> JsonObject:
    """Convert a result to JSON values, without `transitions` and `state`, and with

    time    Unix seconds at its end
    val     of an evaluation batch
    position  of its instance in the batch
    rows    [{prompt_ids, response_ids, mask, log_probs or null, prompt, spans}], what trains before any masking;
            spans are the response's text as [[written by the model, text], ...]
    """
    skipped = ("transitions", "state", "failure", "tool_calls", "sandbox")
    fields = {key: value for key, value in vars(result).items() if key not in skipped}
    return fields | {
        "time": time.time(),
        "val": val_mode,
        "position": position,
        "failure": None if result.failure is None else asdict(result.failure),
        "tool_calls": [asdict(call) for call in result.tool_calls],
        "sandbox": [asdict(command) for command in result.sandbox],
        "rows": [_build_row(datum, tokenizer) for datum in _merge_transitions(result)],
    }


def _merge_transitions(result: TrajectoryResult) -> list[TrainingDatum]:
    try:
        return transitions_to_training_data(result.transitions)
    except ValueError:  # unknown ids: `training_rows` reports the failure
        return []


def _build_row(datum: TrainingDatum, tokenizer: Tokenizer) -> JsonObject:
    mask = [int(value) for value in datum.response_mask]
    return {
        "prompt_ids": list(datum.input_tokens),
        "response_ids": list(datum.response_tokens),
        "mask": mask,
        "log_probs": datum.response_logprobs,
        "prompt": tokenizer.decode(datum.input_tokens, skip_special_tokens=False),
        "spans": _split_spans(datum.response_tokens, mask, tokenizer),
    }


def _split_spans(ids: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer) -> list[list[bool | str]]:
    runs = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [
        [bool(written), tokenizer.decode([token for _, token in run], skip_special_tokens=False)]
        for written, run in runs
    ]


def _write_line(path: Path, line: bytes) -> None:
    """Append a line under a lock, after terminating a last line that is incomplete. Undone if the line does not fit on
    the disk.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # O_APPEND alone is not enough: the size read below must stay true until the write, or a failed write would
        # truncate a line that another process appended meanwhile. Closing the descriptor releases the lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = memoryview((b"\n" if torn else b"") + line + b"\n")
        try:
            while data:
                # A disk that is nearly full may accept only part of the line; the next write then reports the error.
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
