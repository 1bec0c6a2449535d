"""The file of episodes: one JSON line each, whole or absent, and not played again once finished."""

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from skyrl_gym.error import Error

FailureKind = Literal["infra", "model", "environment", "cancelled"]
"""infra: the endpoint, or a service of the environment, did not work. model: the endpoint refused the conversation.
environment: it raised something else, broke its promises, or did not come back. cancelled: the evaluation was stopped
under it."""


@dataclass(kw_only=True)
class EpisodeRecord:
    """One line of episodes.jsonl."""

    task: int
    """Row of the data."""
    sample: int
    messages: list[dict[str, object]] = field(default_factory=list)
    """Prompt, turns and observations; as far as it came, in an episode that failed."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    reward: float | None = None
    """Sum of the turns'. None if the episode failed: a failure is not a 0."""
    outcome_reward: float | None = None
    success: bool | None = None
    done: bool = False
    truncated: bool = False
    metrics: dict[str, object] = field(default_factory=dict)
    finish_reasons: list[str | None] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    failure: FailureKind | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.task, self.sample


class EpisodeFile:
    """episodes.jsonl in an output folder, held by one process at a time.

    Raises:
        Error: another evaluation writes it, or its episodes were made with other settings.
    """

    def __init__(self, folder: Path, identity: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "episodes.jsonl"
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            # The lock belongs to the open file: the kernel releases it however the process ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as held:
            self._file.close()
            raise Error(f"--output {folder}: another evaluation is writing there") from held
        try:
            _check_identity(folder / "settings.json", identity)
            self.records = self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> dict[tuple[int, int], EpisodeRecord]:
        """Read records. A line that a killed process left unfinished is cut off."""
        records, whole = read_records(self.path)
        if whole < self.path.stat().st_size:
            # Else the next record would be appended to half a line.
            os.truncate(self.path, whole)
        return records

    def is_finished(self, key: tuple[int, int]) -> bool:
        """Failed episodes are not: they are played again."""
        return key in self.records and self.records[key].failure is None

    def add(self, record: EpisodeRecord) -> None:
        self._file.write(json.dumps(asdict(record), default=str) + "\n")
        # To the kernel, which keeps it if this process is killed.
        self._file.flush()
        self.records[record.key] = record

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path) -> tuple[dict[tuple[int, int], EpisodeRecord], int]:
    """Read a file of episodes; an episode's last line counts.

    Returns: records by task and sample, and the number of bytes up to a line that a killed process left unfinished.
    """
    # No lock: records are only appended, so a concurrent reader sees complete lines and at most a partial last one.
    records = {}
    whole = 0
    for line in path.read_bytes().splitlines(keepends=True):
        # A process was killed while it wrote this line: the episode is played again.
        if not line.endswith(b"\n"):
            break
        record = EpisodeRecord(**json.loads(line))
        records[record.key] = record
        whole += len(line)
    return records, whole


def group_successes_by_task(records: Iterable[EpisodeRecord]) -> dict[int, list[bool]]:
    """Group the outcomes of scored episodes by task."""
    found: dict[int, list[bool]] = {}
    for record in records:
        # A failure is not a wrong answer: it counts in no share.
        if record.failure is None:
            found.setdefault(record.task, []).append(bool(record.success))
    return found


def _check_identity(path: Path, identity: dict[str, object]) -> None:
    if not path.exists():
        path.write_text(json.dumps(identity, indent=2) + "\n")
        return
    before = json.loads(path.read_text())
    for flag, value in identity.items():
        if before.get(flag) != value:
            raise Error(
                f"{flag} is {value!r}, but the episodes in {path.parent} were made with {before.get(flag)!r}: set "
                "another --output"
            )
