"""Provenance of a checkpoint: settings and training data of the run that wrote it, and their comparison with a run that
resumes it. Independent of models."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.fingerprint import DEFINING, NOT_SAMPLED, flatten_settings
from skyrl_train.config.typed import is_among
from skyrl_train.dataset.dataloader import Dataset
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.types import JsonObject
from skyrl_train.utils.io import write_atomically
from skyrl_train.utils.storage import Place, read_text

PROVENANCE_FILE = "provenance.json"
TRAINING_DATA = "training data"
# fmt: off
_NOT_COMPARED = (
    "trainer.resume_mode", "trainer.resume_path", "trainer.resume_allow_changes",
    "trainer.project_name", "trainer.run_name", "trainer.run_dir", "trainer.ckpt_path", "trainer.export_path",
    "generator.weight_sync_directory", "data.cache_dir",
)
"""Names, places and the resumption itself."""
# fmt: on
_LONGEST_VALUE = 120
_MOST_CHUNKS = 1000
"""Chunks of a dataset that have a hash of their own."""
_CHUNK_DIGITS = 8


@dataclass(frozen=True)
class Provenance:
    """Origin of a checkpoint.

    Args:
        settings: JSON value of every setting, keyed by full name.
        data: short description of the training data with a hash of its content; None without data.
    """

    settings: JsonObject
    data: str | None

    @classmethod
    def of(cls, cfg: SkyRLConfig, dataset: Dataset | None) -> "Provenance":
        """Return the provenance of checkpoints that a run with these settings writes."""
        return cls(flatten_settings(cfg), None if dataset is None else describe_data(dataset))

    def write(self, folder: Path) -> None:
        """Write the provenance into a checkpoint."""
        text = json.dumps({"data": self.data, "settings": self.settings}, indent=1)
        write_atomically(folder / PROVENANCE_FILE, text)

    def sampled(self) -> dict[str, object]:
        """Return the settings and data that change samples or rewards, or define another experiment."""
        settings = {
            name: value
            for name, value in self.settings.items()
            if is_among(name, DEFINING) or not is_among(name, NOT_SAMPLED)
        }
        return {"data": self.data, **settings}

    @classmethod
    def read(cls, folder: Place) -> "Provenance | None":
        """Read the provenance of a checkpoint; None if it has none (written by an earlier release).

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            values = json.loads(read_text(folder / PROVENANCE_FILE))
            return cls(dict(values["settings"]), values["data"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / PROVENANCE_FILE} cannot be read: {error}") from error


@dataclass(frozen=True)
class Change:
    """Setting or training data that changed."""

    name: str
    before: object
    after: Any

    @property
    def is_defining(self) -> bool:
        """True if the change defines another experiment."""
        return self.name == TRAINING_DATA or is_among(self.name, DEFINING)

    def __str__(self) -> str:
        return f"{self.name}: {_format_short(self.before)} -> {_format_short(self.after)}"


def changes_between(before: Provenance, after: Provenance) -> list[Change]:
    """Return the differences in the order of the settings. Names and paths are not compared, nor settings known to only
    one of the two (written by another release)."""
    changes = [] if before.data == after.data else [Change(TRAINING_DATA, before.data, after.data)]
    return changes + [
        Change(name, before.settings[name], value)
        for name, value in after.settings.items()
        if name in before.settings and before.settings[name] != value and name not in _NOT_COMPARED
    ]


def check_changes(changes: Sequence[Change], folder: Place, *, allowed: bool) -> None:
    """Refuse to resume the checkpoint in `folder` if a change defines another experiment.

    Args:
        allowed: `trainer.resume_allow_changes`.

    Raises:
        ConfigError: a change does. The message lists all changes.
    """
    defining = [change for change in changes if change.is_defining]
    if not defining or allowed:
        return
    others = [change for change in changes if not change.is_defining]
    also = f"\nadditional differences (allowed):{lines_of(others)}" if others else ""
    raise ConfigError(
        f"{folder} is a checkpoint of another experiment:{lines_of(defining)}{also}\nUse another folder for this run "
        "(trainer.run_name or trainer.run_dir); or start from scratch in this one with trainer.resume_mode=none, "
        "which renames its checkpoints; or resume from this checkpoint anyway with trainer.resume_allow_changes=true"
    )


def lines_of(changes: Sequence[Change]) -> str:
    """Return one indented line per change, each after a line feed."""
    return "".join(f"\n  {change}" for change in changes)


def describe_data(dataset: Dataset) -> str:
    """Return the number of rows and a hash over their content in order: `1000 rows (3f2a90c41b7e)`."""
    return str(data_digest(dataset))


@dataclass(frozen=True)
class DataDigest:
    """Hashes of a dataset.

    Args:
        num_rows: number of rows.
        in_order: hash over all rows in order.
        content: hash over the rows, independent of their order.
        chunk_rows: rows of a chunk (the last may have fewer).
        chunks: hash of each chunk of consecutive rows, which locates differences between datasets.
    """

    num_rows: int
    in_order: str
    content: str
    chunk_rows: int
    chunks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.num_rows} rows ({self.in_order})"

    def to_json(self) -> JsonObject:
        """Return the digest as JSON values, with all chunks in one text."""
        return asdict(self) | {"chunks": "".join(self.chunks)}

    @classmethod
    def from_json(cls, values: JsonObject) -> "DataDigest":
        """Restore a digest from `to_json`."""
        text = values["chunks"]
        chunks = tuple(text[start : start + _CHUNK_DIGITS] for start in range(0, len(text), _CHUNK_DIGITS))
        return cls(values["num_rows"], values["in_order"], values["content"], values["chunk_rows"], chunks)


def data_digest(dataset: Dataset) -> DataDigest:
    """Return the hashes of a dataset. `PromptDataset` caches them, since every row must be read."""
    summary = getattr(dataset, "summary", None)
    if summary is None:
        return _compute_digest(dataset)
    return DataDigest.from_json(summary("digest", lambda: _compute_digest(dataset).to_json()))


def _compute_digest(dataset: Dataset) -> DataDigest:
    num_rows = len(dataset)
    chunk_rows = max(1, -(-num_rows // _MOST_CHUNKS))
    whole, content, chunks = hashlib.sha256(), 0, [xxhash.xxh32() for _ in range(0, num_rows, chunk_rows)]
    for index in range(num_rows):
        text = json.dumps(dataset[index], skipkeys=True, default=_convert_to_text)
        whole.update(text.encode() + b"\n")
        row = text.removesuffix(f', "{index}"]').encode()  # without the uid, which is the row's position
        content += xxhash.xxh64_intdigest(row)
        chunks[index // chunk_rows].update(row + b"\n")
    return DataDigest(
        num_rows=num_rows,
        in_order=whole.hexdigest()[:12],
        content=f"{content % (1 << 64):016x}",  # a sum is independent of the order
        chunk_rows=chunk_rows,
        chunks=tuple(chunk.hexdigest() for chunk in chunks),
    )


def _convert_to_text(value: Any) -> object:
    """Convert a value that JSON does not support to a hashable text; an object without visible content to its type."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if hasattr(value, "tolist"):  # NumPy, torch
        return value.tolist()
    return repr(value) if type(value).__repr__ is not object.__repr__ else type(value).__qualname__


def _format_short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
