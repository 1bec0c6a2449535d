"""Records of a run folder, as a comparison reads them. Knows files of today's and earlier forms, not what they mean."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.checkpoints import list_checkpoint_dirs
from skyrl_train.errors import DataError
from skyrl_train.provenance import PROVENANCE_FILE, DataDigest
from skyrl_train.run_record import split_fingerprints
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import Phase, RunFolder, compute_config_hash, read_json_lines
from skyrl_train.utils.token_columns import decode_columns

_FIX = "; remove the line or restore the file from a copy, and compare again"


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Args:
        first_step: the first step that it trained.
        settings: by full name; empty if none were kept.
        record: of `starts.jsonl`; empty in folders of earlier releases.
    """

    first_step: int
    settings: Mapping[str, object] = field(default_factory=dict)
    record: JsonObject = field(default_factory=dict)

    @property
    def data(self) -> DataDigest | None:
        """Digest of the training data, if it was recorded."""
        values = self.record.get("data")
        return DataDigest.from_json(values) if values else None


@dataclass(frozen=True)
class StepHashes:
    """Fingerprints of a step: of each row by column, and of each weight by name. `means` are of each row by column."""

    batch: Mapping[str, list[str]] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, list[float | None]] = field(default_factory=dict)


class RecordedRun:
    """Run folder as a comparison reads it: running, finished, crashed or copied.

    Raises:
        DataError: the folder is not a run folder, or a file is broken; names file, line and fix.
    """

    def __init__(self, path: str | Path):
        self.folder = RunFolder(path)
        folder = self.folder
        if not folder.path.is_dir():
            raise DataError(f"{folder.path} is not a folder; pass the folder of trainer.run_dir")
        if not any(p.exists() for p in (folder.config_path, folder.metrics_path, folder.trajectories_folder)):
            raise DataError(
                f"{folder.path} is not a run folder: it has neither config.yaml nor metrics.jsonl nor trajectories. "
                "Pass the folder of trainer.run_dir"
            )

    # ---- what it is made of

    @cached_property
    def starts(self) -> list[Start]:
        """Starts of the run with remaining steps, oldest first; at least one."""
        configs = self._read_configs()
        newest = configs.get("config.yaml", {})
        by_hash = {name: values for name, values in configs.items() if name != "config.yaml"}
        rows = [row for _, row in self._read_lines(self.folder.starts_path)] if self.folder.starts_path.exists() else []
        if not rows:
            return [Start(1, newest)]
        # A later start after the same step replaces the one before: nothing of that one is left.
        last = {int(row["step"]): row for row in rows}
        return [Start(step + 1, by_hash.get(row.get("config", ""), newest), row) for step, row in sorted(last.items())]

    def start_of(self, step: int) -> Start:
        """Return the start that trained a step."""
        return [self.starts[0], *(start for start in self.starts if start.first_step <= step)][-1]

    @cached_property
    def has_starts(self) -> bool:
        """True if the run recorded what it was made of."""
        return bool(self.starts[0].record)

    @cached_property
    def num_unplaced_configs(self) -> int:
        """Number of earlier configurations without a recorded first step."""
        return 0 if self.has_starts else len(list(self.folder.path.glob("config_*.yaml")))

    def _read_configs(self) -> dict[str, dict[str, object]]:
        """Return the configurations by the hash of their text, and the newest as `config.yaml`, too."""
        found = {}
        for path in sorted(self.folder.path.glob("config*.yaml")):
            text = path.read_bytes()
            try:
                values = to_flat_settings(yaml.safe_load(text.decode("utf-8", "replace")))
            except yaml.YAMLError as error:
                raise DataError(
                    f"{path} is not YAML ({str(error).splitlines()[0]}); restore the configuration that the run "
                    "wrote, or remove the file to compare without settings"
                ) from error
            found[compute_config_hash(text)] = values
            if path == self.folder.config_path:
                found["config.yaml"] = values
        return found

    @cached_property
    def data_text(self) -> str | None:
        """The training data in a few words, also of an earlier release (which told them in checkpoints)."""
        digest = self.starts[-1].data
        if digest is not None:
            return str(digest)
        root = self.folder.path / "ckpts"
        for place in reversed(list_checkpoint_dirs(root) if root.is_dir() else []):
            path = Path(str(place)) / PROVENANCE_FILE
            try:
                return json.loads(path.read_text())["data"]
            except (OSError, ValueError, KeyError, TypeError):  # damaged or older: another checkpoint may tell
                continue
        return None

    # ---- the numbers of its steps

    @cached_property
    def metrics(self) -> dict[int, JsonObject]:
        """Metrics of each step; of several lines of a step the last that has a metric counts."""
        found: dict[int, JsonObject] = {}
        if self.folder.metrics_path.exists():
            for _, row in self._read_lines(self.folder.metrics_path):
                found.setdefault(int(row["step"]), {}).update(row)
        return found

    @cached_property
    def hashes(self) -> dict[int, StepHashes]:
        """Fingerprints of each step that has some."""
        found: dict[int, StepHashes] = {}
        names: list[str] = []
        if self.folder.fingerprints_path.exists():
            for _, row in self._read_lines(self.folder.fingerprints_path):
                weights = row.get("weights", {})
                names = weights.get("names", names)
                own = dict(zip(names, split_fingerprints(weights.get("values", "")), strict=False))
                described = row.get("batch", {})
                batch = {name: split_fingerprints(text) for name, text in described.get("hashes", {}).items()}
                earlier = found.get(int(row["step"]), StepHashes())  # a resumed run notes its first sync again
                found[int(row["step"])] = StepHashes(
                    {**earlier.batch, **batch}, own or earlier.weights, {**earlier.means, **described.get("means", {})}
                )
        return found

    @cached_property
    def trajectory_paths(self) -> dict[tuple[int, Phase], Path]:
        """Files of trajectories by step and phase."""
        return {(file.step, file.phase): file.path for file in self.folder.list_trajectory_files()}

    def read_trajectories(self, step: int, phase: Phase) -> Iterator[JsonObject]:
        """Yield the rows of a step, less a torn last one."""
        return (row for _, row in self._read_lines(self.trajectory_paths[step, phase], needs_step=False))

    def read_token_column(self, step: int, row: int, name: str) -> list[float | None] | None:
        """Return what training knew of the tokens of a row of a step (`utils/token_columns.py`); None if it was not
        recorded."""
        path = self.folder.token_columns_path(step)
        if not path.exists():
            return None
        lines = self._read_lines(path, needs_step=False)
        return decode_columns(next(islice((own for _, own in lines), row, None), {})).get(name)

    @cached_property
    def steps(self) -> set[int]:
        """Recorded steps; 0 is before training."""
        of_files = {step for step, _ in self.trajectory_paths}
        return set(self.metrics) | set(self.hashes) | of_files

    @cached_property
    def last_step(self) -> int:
        """Last recorded training step; 0: none."""
        return max((step for step in self.steps if step > 0), default=0)

    def _read_lines(self, path: Path, *, needs_step: bool = True) -> Iterator[tuple[bytes, JsonObject]]:
        try:
            for number, (line, row) in enumerate(read_json_lines(path), start=1):
                if not isinstance(row, dict) or (needs_step and not isinstance(row.get("step"), int)):
                    wanted = "an object with a number `step`" if needs_step else "an object"
                    raise DataError(f"{path}, line {number} must be {wanted}; got {line[:80]!r}{_FIX}")
                yield line, row
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); make it readable, or compare a copy") from error


def to_flat_settings(values: object, name: str = "") -> dict[str, Any]:
    """Return nested settings by their full names. Empty sections stay as `{}`."""
    if not isinstance(values, Mapping) or not values:
        return {name: values} if name else {}
    return {
        full_name: value
        for key, inner in values.items()
        for full_name, value in to_flat_settings(inner, f"{name}.{key}" if name else str(key)).items()
    }
