"""Journal of rollouts: a file with the finished groups that are not trained yet, and the scheduling decisions about
them.

One JSON object per line, appended immediately: a killed process loses at most the line being written. The last key of a
line, `sum`, is a checksum of the text before it; altered lines are refused.

    {"experiment": …}                                      the first line: everything that samples and rewards depend on
    {"finished": ticket, "group": …}                       a group, its metrics, and the weight version at its start
    {"batch": step, "tickets": […]}                        groups that training step `step` consumes, in order
    {"failed": ticket}   {"filtered": ticket}   {"stale": [tickets], "deferred": …}

Together with a checkpoint of the schedule it gives the state at the last line. A checkpoint compacts the journal.

Example of a group that fails, another that finishes, and the step that trains it:
    >>> import tempfile
    >>> from skyrl_train.rollouts.types import TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID
    >>> path = Path(tempfile.mkdtemp()) / "journal.jsonl"
    >>> journal = RolloutJournal(path, {"seed": 1})
    >>> journal.append_failed(0)
    >>> sample = TrainingSample([5, 6, 7], [8, 9, 2], loss_mask=[1, 1, 1], rewards=[0.0, 0.0, 1.0])
    >>> group = TrajectoryGroup("question_1", [Trajectory(TrajectoryID("question_1", 0), [sample])])
    >>> journal.append_finished(FinishedGroup(ticket=1, group=group, metrics={}, version=0, seconds=1.5))
    >>> journal.append_batch(1, [1])
    >>> journal.close()
    >>> [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    ['experiment', 'failed', 'finished', 'batch']
    >>> recovered = RolloutJournal(path, {"seed": 1}).recover(ScheduleState())
    >>> recovered.batches
    {1: [1]}
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np
import torch
import xxhash
from loguru import logger
from pydantic import ConfigDict, TypeAdapter

from skyrl_train.errors import CheckpointError
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.schedule import ScheduleState
from skyrl_train.utils.io import fsync_folder, write_atomically
from skyrl_train.utils.run_folder import read_json_lines, remove_torn_line

_SUM_BYTES = len(b', "sum": "0123456789abcdef"}\n')
_GROUPS = TypeAdapter(list[FinishedGroup], config=ConfigDict(ser_json_inf_nan="constants"))


@dataclass
class RecoveredRollouts:
    """State of the rollouts after a checkpoint and the lines of a journal."""

    state: ScheduleState
    groups: dict[int, FinishedGroup] = field(default_factory=dict)
    """Finished groups by ticket, those of `state.finished`."""

    batches: dict[int, list[int]] = field(default_factory=dict)
    """Tickets of steps after the checkpoint that had begun: they train the same groups again."""


class RolloutJournal:
    """Journal of one run.

    Args:
        path: path of the file; its folder is created.
        experiment: everything that samples and rewards depend on, as JSON values; groups of other experiments are not
            used.
    """

    def __init__(self, path: Path, experiment: Mapping[str, object]):
        self.path = path
        self._experiment = json.loads(json.dumps(experiment))
        self._file: FileIO | None = None
        self._marked: tuple[list[FinishedGroup], int] | None = None  # at a checkpoint: groups, bytes of the file

    # ---- writing

    def append_finished(self, group: FinishedGroup) -> None:
        """Append a finished group."""
        self._write(_format_finished_line(group))

    def append_batch(self, step: int, tickets: Sequence[int]) -> None:
        """Append the groups that a training step consumes."""
        self._append({"batch": step, "tickets": list(tickets)})

    def append_failed(self, ticket: int) -> None:
        """Append that a group failed and is replaced by another."""
        self._append({"failed": ticket})

    def append_filtered(self, ticket: int) -> None:
        """Append that a finished group is excluded from training."""
        self._append({"filtered": ticket})

    def append_stale(self, tickets: Sequence[int], *, deferred: bool) -> None:
        """Append that groups became stale and are regenerated, at once or at the end of their epoch (`deferred`)."""
        self._append({"stale": list(tickets), "deferred": deferred})

    def mark_checkpoint(self, groups: Sequence[FinishedGroup]) -> None:
        """Record that the schedule's state was taken for a checkpoint.

        Args:
            groups: finished, untrained groups in order.
        """
        try:
            file = self._file or self._open()
        except OSError as error:
            raise self._make_write_error(error) from error
        self._marked = list(groups), file.seek(0, os.SEEK_END)

    def compact(self) -> None:
        """Compact the journal after the checkpoint of the last `mark_checkpoint` completed: keep the groups at that
        time and all later lines. The result is flushed to disk.

        Raises:
            CheckpointError: the disk is full or not writable. The journal is unchanged.
        """
        assert self._marked is not None, "a checkpoint must be marked before the journal is truncated"
        groups, num_bytes = self._marked
        try:
            with open(self.path, "rb") as file:
                file.seek(num_bytes)
                since = file.read()
            write_atomically(
                self.path, b"".join([self._format_first_line(), *map(_format_finished_line, groups), since])
            )
        except OSError as error:
            raise self._make_write_error(error) from error
        self._marked = None
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, event: Mapping[str, object]) -> None:
        self._write(_format_json_line(event))

    def _write(self, line: bytes) -> None:
        """Write one line. It survives a crash of this process immediately, and a crash of the machine after the next
        checkpoint."""
        try:
            file = self._file or self._open()
            while line:  # unbuffered: a full disk may accept a part
                line = line[file.write(line) :]
        except OSError as error:
            self.close()
            raise self._make_write_error(error) from error

    def _open(self) -> FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
        remove_torn_line(self._file)
        if self._file.seek(0, 2) == 0:
            self._file.write(self._format_first_line())
        if is_new:
            fsync_folder(self.path.parent)
        return self._file

    def _format_first_line(self) -> bytes:
        return _format_json_line({"experiment": self._experiment})

    def _make_write_error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the rollout journal {self.path} cannot be written: {error}. Its groups are not lost: free disk space "
            "(or make the folder writable) and run the same command again"
        )

    # ---- reading

    def discard(self) -> None:
        """Remove the file, since the run starts from scratch."""
        self.close()
        self.path.unlink(missing_ok=True)

    def recover(self, state: ScheduleState) -> RecoveredRollouts:
        """Return the state of the rollouts at the last line.

        Args:
            state: schedule state of the checkpoint that the run resumes from, or the initial state.

        Raises:
            CheckpointError: a line before the last is damaged.
        """
        events = self._read_events()
        recovered = RecoveredRollouts(state)
        gone: set[int] = set()
        restarted, deferred = set(state.restarted), set(state.deferred)
        for event in events:
            match event:
                case {"group": _, "finished": int(ticket)}:
                    recovered.groups.pop(ticket, None)  # a later one is ordered after groups finished earlier
                    recovered.groups[ticket] = _group_of(event, self.path)
                case {"batch": int(step), "tickets": [*tickets]}:
                    recovered.batches[step] = tickets
                case {"failed": int(ticket)} | {"filtered": int(ticket)}:
                    gone.add(ticket)
                case {"stale": [*tickets], "deferred": bool(is_deferred)}:
                    restarted.update(tickets)
                    deferred.update(tickets if is_deferred else ())
                    for ticket in tickets:
                        recovered.groups.pop(ticket, None)
                case _:
                    raise CheckpointError(f"{self.path} has a line that is not a journal entry: {str(event)[:200]}")
        trained = {t for step, tickets in recovered.batches.items() if step <= state.num_trained_steps for t in tickets}
        recovered.batches = {s: tickets for s, tickets in recovered.batches.items() if s > state.num_trained_steps}
        _merge(recovered, gone, trained, restarted, deferred)
        return recovered

    def _read_verified_lines(self) -> Iterator[dict[str, object]]:
        """Yield the lines without checksums, except an incomplete last line.

        Raises:
            CheckpointError: a line was altered.
        """
        for number, (line, row) in enumerate(read_json_lines(self.path), start=1):
            found = row.pop("sum", None)
            if found is None and number == 1:
                yield {}  # written by a release without checksums: counts as another experiment
                return
            if _add_checksum(line[:-_SUM_BYTES] + b"}\n") != line:
                raise CheckpointError(
                    f"{self.path}, line {number} is corrupted (its checksum differs): the file was modified or its "
                    "disk is faulty. To generate its finished groups again, remove the file"
                )
            yield row

    def _read_events(self) -> list[dict[str, object]]:
        """Return the lines after the first; empty for the journal of another experiment."""
        if not self.path.exists():
            return []
        lines = self._read_verified_lines()
        first = next(lines, None)
        if first is None:
            return []
        if changes := _find_changes(first.get("experiment"), self._experiment):
            logger.warning(
                f"{self.path} is the journal of a run with different sampling or rewards ({', '.join(changes)} "
                "changed): its finished groups are generated again"
            )
            self.discard()
            return []
        return list(lines)


def _merge(
    recovered: RecoveredRollouts, gone: set[int], trained: set[int], restarted: set[int], deferred: set[int]
) -> None:
    """Advance the state of a checkpoint to the end of the journal: untrained tickets of the checkpoint, and tickets
    started since, are finished if their group is present; otherwise they wait to be restarted."""
    state = recovered.state
    known = {*state.finished, *state.waiting, *state.deferred}
    mentioned = {*recovered.groups, *gone, *restarted, *(t for tickets in recovered.batches.values() for t in tickets)}
    end = max([state.next_ticket, *(ticket + 1 for ticket in mentioned)])
    missing = [t for t in state.finished if t not in recovered.groups and t not in gone]
    if missing:
        logger.warning(f"{len(missing)} finished groups are missing in the rollout journal and will be generated again")
    open_tickets = (known | set(range(state.next_ticket, end))) - gone - trained
    recovered.groups = {ticket: group for ticket, group in recovered.groups.items() if ticket in open_tickets}
    state.finished = {ticket: group.oldest_version for ticket, group in recovered.groups.items()}
    unfinished = open_tickets - recovered.groups.keys()
    state.deferred = sorted(unfinished & deferred)
    state.waiting = sorted(unfinished - deferred)
    state.restarted = restarted & open_tickets
    state.next_ticket = end


def _add_checksum(line: bytes) -> bytes:
    """Add the checksum to a line of JSON."""
    text = line.removesuffix(b"}\n")
    return b'%s, "sum": "%016x"}\n' % (text, xxhash.xxh64_intdigest(text))


def _find_changes(before: object, after: Mapping[str, object]) -> list[str]:
    """Return the sorted names of differing entries of two experiments."""
    if not isinstance(before, dict):
        return ["its first line"]
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _format_finished_line(group: FinishedGroup) -> bytes:
    values = _GROUPS.dump_json([group], fallback=_convert_to_json_value)[1:-1]
    return _add_checksum(b'{"finished": %d, "group": %s}\n' % (group.ticket, values))


def _group_of(event: Mapping[str, object], path: Path) -> FinishedGroup:
    try:
        return _GROUPS.validate_python([event["group"]])[0]
    except ValueError as error:
        raise CheckpointError(
            f"{path} contains a group that this release cannot read: {error}. To drop the groups that were finished "
            "but not trained, remove the file"
        ) from error


def _format_json_line(event: Mapping[str, object]) -> bytes:
    return _add_checksum(json.dumps(event).encode() + b"\n")


def _convert_to_json_value(value: object) -> object:
    """Convert an environment's metric to a JSON value: numbers of NumPy and torch to numbers, anything else to text."""
    return value.item() if isinstance(value, np.generic | torch.Tensor) else str(value)
