"""Trajectories of a step: a summary of each, and single rows as stored."""

import json
from collections.abc import Sequence
from threading import Lock

from skyrl_inspect.dashboard import agent_files
from skyrl_inspect.dashboard.json_lines import MAX_LINE, Cache, LineOffsets, parse
from skyrl_inspect.dashboard.runs_folder import FileState, NotBelowError, RunsFolder, join
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import COMPRESSED, get_token_columns_name
from skyrl_train.utils.token_columns import decode_columns

MAX_STEPS = 6
"""StepTrajectories whose summaries are kept in memory."""

MAX_ROWS = 20_000
"""Rows of a step that are summarized."""

PREVIEW = 160


class StepTrajectories:
    """Trajectory files of the runs of a folder."""

    def __init__(self, folder: RunsFolder):
        self._folder = folder
        self._offsets: Cache[LineOffsets] = Cache(64)
        self._summaries: Cache[JsonObject] = Cache(MAX_STEPS)
        self._lock = Lock()

    def summary(self, run: str, phase: str, step: int) -> JsonObject:
        """Return a short row for each trajectory of a step.

        Raises:
            NotBelowError: that step has none.
        """
        path, state = self._file(run, phase, step)
        return self._summaries.get((path, state), lambda: self._read_summary(path, state))

    def row(self, run: str, phase: str, step: int, number: int) -> bytes:
        """Return the line of a trajectory, unparsed.

        Raises:
            NotBelowError: the line does not exist or is longer than `MAX_LINE`.
        """
        path, state = self._file(run, phase, step)
        line = self._read_line(path, state, number)
        record = parse(line) if path == join(run, agent_files.NAME) else None
        if record is None:
            return line
        return json.dumps(agent_files.to_row(record) | {"branches": agent_files.compute_branches(record)}).encode()

    def columns(self, run: str, step: int, number: int) -> JsonObject:
        """Return the training data of a trajectory's tokens: `uid` and columns by name; empty if it was not recorded
        (yet).
        """
        path, state = self._find_file(join(run, "trajectories", get_token_columns_name(step)))
        if state is None:
            return {}
        try:
            row = parse(self._read_line(path, state, number))
        except NotBelowError:  # torn
            return {}
        return {} if row is None else {"uid": str(row.get("uid")), "columns": decode_columns(row)}

    def _read_line(self, path: str, state: FileState, number: int) -> bytes:
        with self._lock:
            offsets = self._scan(path, state)
            if not 0 <= number < len(offsets):
                raise NotBelowError(f"{path} has {len(offsets)} complete lines; no line {number}")
            offset, size = offsets.span(number)
        if size > MAX_LINE:
            raise NotBelowError(
                f"line {number} of {path} has {size:,} bytes, more than the {MAX_LINE:,} that can be shown"
            )
        with self._folder.open(path) as file:
            file.seek(offset)
            return file.read(size)

    def _file(self, run: str, phase: str, step: int) -> tuple[str, FileState]:
        if phase not in ("train", "eval"):
            raise NotBelowError(f"phase must be train or eval; got {phase!r}")
        path, state = self._find_file(join(run, "trajectories", f"{phase}_step_{step:06d}.jsonl"))
        if (phase, step) == (agent_files.PHASE, agent_files.STEP) and state is None:
            path = join(run, agent_files.NAME)
            state = self._folder.state(path)
        if state is None:
            raise NotBelowError(f"{path} does not exist")
        return path, state

    def _find_file(self, path: str) -> tuple[str, FileState | None]:
        """Return the plain or compressed file, whichever exists, and its state."""
        compressed = self._folder.state(path + COMPRESSED)
        return (path, self._folder.state(path)) if compressed is None else (path + COMPRESSED, compressed)

    def _scan(self, path: str, state: FileState) -> LineOffsets:
        offsets = self._offsets.get(path, lambda: LineOffsets(path.endswith(COMPRESSED)))
        with self._folder.open(path) as file:
            offsets.update(file, state)
        return offsets

    def _read_summary(self, path: str, state: FileState) -> JsonObject:
        with self._lock:
            offsets = self._scan(path, state)
            spans = [offsets.span(number) for number in range(min(len(offsets), MAX_ROWS))]
        rows: list[JsonObject] = []
        with self._folder.open(path) as file:
            for number, (offset, size) in enumerate(spans):
                file.seek(offset)
                row = parse(file.read(size)) if size <= MAX_LINE else None
                if row is not None and "instance_id" in row:
                    row = agent_files.to_row(row)
                rows.append({"line": number, "bytes": size, **(get_summary(row) if row else {"is_broken": True})})
        torn = 0 if path.endswith(COMPRESSED) else max(0, state.size - offsets.end)  # a compressed file is whole
        return {"rows": rows, "num_rows": len(offsets), "torn_bytes": torn}


def get_summary(row: JsonObject) -> JsonObject:
    """Return the facts of a trajectory that a table shows. A field of another type than ours becomes None."""
    tokens = row.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    log_probs = _numbers(tokens.get("log_probs"))
    versions = [value for value in _numbers(tokens.get("weight_versions")) if value >= 0]
    failure = row.get("failure")
    failure = failure if isinstance(failure, dict) else None
    return {
        "uid": _text(row.get("uid")),
        "sample": row.get("sample") if isinstance(row.get("sample"), int) else None,
        "turn": row.get("step") if isinstance(row.get("step"), int) else None,
        "is_last": row.get("is_last_step", True) is True,
        "reward": row.get("reward") if isinstance(row.get("reward"), int | float) else None,
        "tokens": row["num_tokens"] if isinstance(row.get("num_tokens"), int) else len(_list(tokens.get("ids"))),
        "trained": sum(_numbers(tokens.get("loss_mask"))),
        "prompt_tokens": len(_list(row.get("prompt_ids"))),
        "stop": _text(row.get("stop_reason")) if row.get("stop_reason") is not None else None,
        "failure": failure and {"kind": _text(failure.get("kind")), "message": _text(failure.get("message"), 400)},
        "log_prob": sum(log_probs) / len(log_probs) if log_probs else None,
        "versions": [min(versions), max(versions)] if versions else None,
        "prompt": _get_tail(row.get("prompt")),
        "preview": _text(row.get("response"), PREVIEW),
        "stages": [span for span in _list(row.get("stages")) if _is_span(span)],
    }


def _is_span(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], str)
        and all(isinstance(each, int | float) for each in value[1:])
    )


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _numbers(value: object) -> list[float]:
    return [item for item in _list(value) if isinstance(item, int | float)]


def _text(value: object, limit: int = 200) -> str:
    return value[:limit] if isinstance(value, str) else str(value)[:limit]


def _get_tail(value: object) -> str:
    """The end of a prompt: its beginning is the same for all prompts."""
    return value[-PREVIEW:] if isinstance(value, str) else ""
