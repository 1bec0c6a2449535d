"""Store of checkpoints, each complete or absent. Independent of the files' contents.

A folder is a checkpoint if it has a manifest with the files' hashes. On a file system, the checkpoint is written into a
temporary folder next to its final path; every file is flushed to disk, and one rename publishes the folder
(`whole_folders.replacing`). In an object store, the manifest is written last, and objects without a manifest left by a
killed run are deleted before the next checkpoint. After a crash at any point, `global_step_N` is complete or absent.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from loguru import logger

from skyrl_train.config import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.training_backends.checkpoint import WrittenFiles
from skyrl_train.utils.io import FileRecord, compute_sha256
from skyrl_train.utils.nodes import get_node_name
from skyrl_train.utils.shared_download import download_files
from skyrl_train.utils.storage import (
    DraftFolder,
    Place,
    get_size,
    list_names,
    list_sizes,
    location,
    move_folder,
    publishing,
    read_text,
    remove_folder,
    replace_file,
)

GLOBAL_STEP_PREFIX = "global_step_"
MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"
_SUPERSEDED = "superseded_"


def extract_step_from_path(path: str | Place) -> int:
    """Return N for a path that ends in `global_step_N`, otherwise -1."""
    match = re.fullmatch(rf"{GLOBAL_STEP_PREFIX}(\d+)", PurePosixPath(str(path)).name)
    return int(match.group(1)) if match else -1


def list_checkpoint_dirs(root: str | Place) -> list[Place]:
    """Return the complete checkpoints under `root`, oldest step first."""
    place = location(root)
    steps = sorted((step, name) for name in list_names(place) if (step := extract_step_from_path(name)) >= 0)
    return [place / name for _, name in steps if get_size(place / name / MANIFEST) is not None]


class CheckpointStore:
    """Store of the checkpoints of one run.

    Args:
        root: folder or URL of the checkpoints.
        max_to_keep: number of newest checkpoints to keep; negative: all.
    """

    def __init__(self, root: str | Place, max_to_keep: int = -1):
        self.root = location(root)
        self._max_to_keep = max_to_keep

    @contextmanager
    def writing(self, step: int) -> Iterator["CheckpointDraft"]:
        """Yield a draft to write the checkpoint of `step` into. It is published when the block succeeds.

        Raises:
            CheckpointError: the write failed (e.g. a full disk). Earlier checkpoints are unchanged.
        """
        place = self.root / f"{GLOBAL_STEP_PREFIX}{step}"
        try:
            self._remove_incomplete()
            with publishing(place, seal=MANIFEST) as folder:
                draft = CheckpointDraft(folder)
                yield draft
                draft.write_manifest(step)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.root}: {error}. Its partial files were "
                f"removed; the newest complete checkpoint is {self._find_newest_name()}."
            ) from error
        self._remove_old()
        try:
            replace_file(self.root / LATEST, f"{step}\n")
        except OSError as error:
            raise CheckpointError(f"{place} is complete, but {LATEST} could not be written: {error}") from error

    def select(self, config: TrainerConfig) -> Place | None:
        """Return the checkpoint selected by `resume_mode` without reading it; None for a fresh start. Changes nothing.

        Raises:
            ConfigError: `resume_path` is not a checkpoint.
            CheckpointError: the folder cannot be read.
        """
        try:
            return self._select(config)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be listed: {error}") from error

    def _select(self, config: TrainerConfig) -> Place | None:
        if config.resume_mode in (None, "none"):
            return None
        if config.resume_mode == "latest":
            complete = list_checkpoint_dirs(self.root)
            return complete[-1] if complete else None
        folder = location(config.resume_path or "")
        if extract_step_from_path(folder) < 0:
            raise ConfigError(
                f"trainer.resume_path must be a checkpoint folder ending in {GLOBAL_STEP_PREFIX}N; got {folder}"
            )
        if get_size(folder / MANIFEST) is None:
            raise ConfigError(f"trainer.resume_path: no complete checkpoint found at {folder}")
        return folder

    def find(self, config: TrainerConfig) -> "Checkpoint | None":
        """Return the checkpoint to resume from, after verifying the files read by this process against its manifest;
        None for a fresh start.

        Raises:
            ConfigError: `resume_path` is not a checkpoint.
            CheckpointError: its files were altered.
        """
        folder = self.select(config)
        if folder is None:
            return None
        return Checkpoint(folder, verify(folder))

    def rename_later(self, than: Place | None) -> None:
        """Rename checkpoints of steps after the one that the run resumes from (None: all). They belong to an abandoned
        branch, which must not be resumed or counted among the checkpoints to keep."""
        after_step = -1
        if than is not None and than.parent.resolve() == self.root.resolve():
            after_step = extract_step_from_path(than)
        for newer in list_checkpoint_dirs(self.root):
            if extract_step_from_path(newer) > after_step:
                aside = self.root / f"{_SUPERSEDED}{newer.name}"
                try:
                    move_folder(newer, aside, MANIFEST)
                except OSError as error:
                    raise CheckpointError(f"{newer} could not be renamed to {aside.name}: {error}") from error
                logger.warning(f"{newer} is newer than the step to resume from; renamed to {aside.name}")

    def _remove_old(self) -> None:
        if self._max_to_keep < 0:
            return
        for folder in list_checkpoint_dirs(self.root)[: -self._max_to_keep]:
            remove_folder(folder, MANIFEST)

    def _remove_incomplete(self) -> None:
        """Delete objects without a manifest, left by killed runs, from an object store. (On a file system, incomplete
        folders do not have the name of a checkpoint.)"""
        if isinstance(self.root, Path):
            return
        for name in list_names(self.root):
            is_ours = extract_step_from_path(name.removeprefix(_SUPERSEDED)) >= 0
            if is_ours and get_size(self.root / name / MANIFEST) is None:
                remove_folder(self.root / name, MANIFEST)

    def _find_newest_name(self) -> str:
        complete = list_checkpoint_dirs(self.root)
        return complete[-1].name if complete else "none"


class CheckpointDraft:
    """Folder of a checkpoint that is being written.

    Args:
        folder: this process writes files into its `local`, ranks write a model's files into `shared` / its name.
    """

    def __init__(self, folder: DraftFolder):
        self.folder = folder.local
        self.shared = folder.shared
        self._records: dict[str, FileRecord] = {}

    def add(self, model: str, reports: Sequence[WrittenFiles]) -> None:
        """Add the files of a model with the hashes computed by its ranks.

        Args:
            reports: report of each rank, in order.

        Raises:
            CheckpointError: a file is not visible to this process. Visible files prove that its writer uses the same
                folder; without that proof no manifest is written.
        """
        check_all_seen(self.shared / model, model, reports)
        for report in reports:
            self._records |= {f"{model}/{name}": record for name, record in report.files.items()}

    def write_manifest(self, step: int) -> None:
        """Write the manifest that completes the checkpoint. Files not hashed by a rank are hashed here."""
        files = dict(self._records)
        for name, size in list_sizes(self.folder).items():
            files.setdefault(name, FileRecord(size, compute_sha256(self.folder / name)))
        described = {name: asdict(files[name]) for name in sorted(files)}
        (self.folder / MANIFEST).write_text(json.dumps({"global_step": step, "files": described}, indent=1))


class Checkpoint:
    """Complete checkpoint.

    Args:
        folder: its location.
        records: size and hash of each file, by name.
    """

    def __init__(self, folder: Place, records: dict[str, FileRecord]):
        self.folder = folder
        self._records = records

    def records_of(self, model: str) -> dict[str, FileRecord]:
        """Return size and hash of a model's files, by name in its folder."""
        prefix = f"{model}/"
        return {name.removeprefix(prefix): record for name, record in self._records.items() if name.startswith(prefix)}

    @contextmanager
    def local_copy(self, without: Sequence[str]) -> Iterator[Path]:
        """Yield a local folder with all files except some models' files, which ranks fetch. A local checkpoint is
        yielded directly.

        Raises:
            CheckpointError: a file was altered or cannot be read.
        """
        if isinstance(self.folder, Path):
            yield self.folder
            return
        records = {name: record for name, record in self._records.items() if name.partition("/")[0] not in without}
        with tempfile.TemporaryDirectory(prefix="skyrl-checkpoint-") as copy:
            with self.naming_remedy():
                download_files(self.folder, records, Path(copy))
            yield Path(copy)

    @contextmanager
    def naming_remedy(self) -> Iterator[None]:
        """Add the remedy to the error of a damaged downloaded file."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if isinstance(self.folder, Path):
                raise
            raise CheckpointError(f"{error}; {_describe_remedy(self.folder)}") from error


def verify(folder: str | Place) -> dict[str, FileRecord]:
    """Check that every file of the checkpoint exists with its recorded hash; in an object store with its recorded size
    (hashes are compared after downloads). Returns size and hash of each file.

    Raises:
        CheckpointError: a file is missing or altered.
    """
    place = location(folder)
    try:
        manifest = json.loads(read_text(place / MANIFEST))
        records = {name: FileRecord(file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
        sizes = list_sizes(place)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place / MANIFEST} cannot be read ({error}); {_describe_remedy(place)}") from error

    def damage_of(item: tuple[str, FileRecord]) -> str | None:
        name, expected = item
        if name not in sizes:
            return f"{place / name} is missing"
        if sizes[name] != expected.bytes:
            return f"{place / name} is corrupted (it has {sizes[name]} bytes, expected {expected.bytes})"
        if isinstance(place, Path) and compute_sha256(place / name) != expected.sha256:
            return f"{place / name} is corrupted (its hash differs)"
        return None

    # In threads: hashing releases the interpreter's lock, and one core takes a second for about a gigabyte.
    with ThreadPoolExecutor() as threads:
        for damage in threads.map(damage_of, records.items()):
            if damage:
                raise CheckpointError(f"{damage}; {_describe_remedy(place)}")
    return records


def check_all_seen(folder: Place, model: str, reports: Sequence[WrittenFiles]) -> None:
    """Raise CheckpointError unless every file that a rank of `model` wrote into `folder` is visible to this process.

    Visible files prove that their writer uses the same folder; without that proof no manifest is written.

    Args:
        reports: report of each rank, in order.
    """
    for rank, report in enumerate(reports):
        for name, record in report.files.items():
            found = get_size(folder / name)
            if found == record.bytes:
                continue
            here = "cannot see" if found is None else f"sees with {found} bytes"
            raise CheckpointError(
                f"{model} rank {rank} on node {report.node} wrote {name} ({record.bytes} bytes) into {folder}, which "
                f"node {get_node_name()} {here}: the folder is not shared by all nodes. Set trainer.ckpt_path (or "
                "trainer.run_dir) to a folder on a file system that every node sees"
            )


def _describe_remedy(folder: Place) -> str:
    earlier = [path for path in list_checkpoint_dirs(folder.parent) if path.name != folder.name]
    choice = (
        f"trainer.resume_mode=from_path trainer.resume_path={earlier[-1]}" if earlier else "trainer.resume_mode=none"
    )
    return f"the checkpoint is damaged. Resume from another one with {choice}."
