"""Store of checkpoints, each complete or absent. Knows files, not their contents.

A manifest with the files' hashes makes a folder a checkpoint. On a file system it is written into a folder beside its
final path; every file is flushed to the disk, and one rename puts the folder there (`whole_folders.replacing`). In an
object store the manifest is written last, and what a killed run left without one is deleted before the next checkpoint
is written. Whatever kills the run, `global_step_N` is complete or absent.
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
    write_whole,
)

GLOBAL_STEP_PREFIX = "global_step_"
MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"
_SUPERSEDED = "superseded_"


def extract_step_from_path(path: str | Place) -> int:
    """Return N of a path that ends in `global_step_N`; -1 if it does not."""
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
        root: their folder, or a URL.
        max_to_keep: number of newest checkpoints to keep; negative: all.
    """

    def __init__(self, root: str | Place, max_to_keep: int = -1):
        self.root = location(root)
        self._max_to_keep = max_to_keep

    @contextmanager
    def writing(self, step: int) -> Iterator["CheckpointDraft"]:
        """Yield a draft to write the checkpoint of `step` into. It becomes the checkpoint when the block ends well.

        Raises:
            CheckpointError: it could not be written (a full disk, say). Earlier checkpoints are as they were.
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
                f"the checkpoint of step {step} could not be written to {self.root}: {error}. "
                f"Nothing of it is left; the newest complete one is {self._newest_name()}."
            ) from error
        self._remove_old()
        try:
            write_whole(self.root / LATEST, f"{step}\n")
        except OSError as error:
            raise CheckpointError(
                f"{place} is complete, but {LATEST} beside it could not be written: {error}"
            ) from error

    def select(self, config: TrainerConfig) -> Place | None:
        """Return the checkpoint that `resume_mode` asks for, unread; None for a fresh start. Changes nothing.

        Raises:
            ConfigError: `resume_path` names no checkpoint.
            CheckpointError: the folder cannot be read.
        """
        try:
            return self._select(config)
        except OSError as error:
            raise CheckpointError(f"the checkpoints cannot be listed: {error}") from error

    def _select(self, config: TrainerConfig) -> Place | None:
        if config.resume_mode in (None, "none"):
            return None
        if config.resume_mode == "latest":
            complete = list_checkpoint_dirs(self.root)
            return complete[-1] if complete else None
        folder = location(config.resume_path or "")
        if extract_step_from_path(folder) < 0:
            raise ConfigError(
                f"trainer.resume_path must end in {GLOBAL_STEP_PREFIX}N, the folder of one checkpoint; got {folder}"
            )
        if get_size(folder / MANIFEST) is None:
            raise ConfigError(f"trainer.resume_path: there is no complete checkpoint at {folder}")
        return folder

    def find(self, config: TrainerConfig) -> "Checkpoint | None":
        """Return the checkpoint to resume from, with the files that this process reads verified against its manifest;
        None for a fresh start.

        Raises:
            ConfigError: `resume_path` names no checkpoint.
            CheckpointError: its files are not what was written.
        """
        folder = self.select(config)
        if folder is None:
            return None
        return Checkpoint(folder, verify(folder))

    def rename_later(self, than: Place | None) -> None:
        """Rename checkpoints of later steps than the one that the run resumes from (None: all): they are of a branch
        that the run has left, and must be neither resumed from nor counted among those to keep."""
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
                logger.warning(f"{newer} is later than the step resumed from; renamed to {aside.name}")

    def _remove_old(self) -> None:
        if self._max_to_keep < 0:
            return
        for folder in list_checkpoint_dirs(self.root)[: -self._max_to_keep]:
            remove_folder(folder, MANIFEST)

    def _remove_incomplete(self) -> None:
        """Delete from an object store what killed runs left without a manifest. (On a file system no such folder has
        the name of a checkpoint.)"""
        if isinstance(self.root, Path):
            return
        for name in list_names(self.root):
            is_ours = extract_step_from_path(name.removeprefix(_SUPERSEDED)) >= 0
            if is_ours and get_size(self.root / name / MANIFEST) is None:
                remove_folder(self.root / name, MANIFEST)

    def _newest_name(self) -> str:
        complete = list_checkpoint_dirs(self.root)
        return complete[-1].name if complete else "none"


class CheckpointDraft:
    """Folder of a checkpoint that is being written.

    Args:
        folder: this process writes files into its `local`, ranks those of a model into `shared` / its name.
    """

    def __init__(self, folder: DraftFolder):
        self.folder = folder.local
        self.shared = folder.shared
        self._records: dict[str, FileRecord] = {}

    def add(self, model: str, reports: Sequence[WrittenFiles]) -> None:
        """Take the files of a model into the checkpoint, with the hashes that its ranks computed.

        Args:
            reports: one of each rank, in order.

        Raises:
            CheckpointError: this process does not see a file. One that is seen here proves that its writer's folder is
                this one; without that proof no manifest is written.
        """
        check_all_seen(self.shared / model, model, reports)
        for report in reports:
            self._records |= {f"{model}/{name}": record for name, record in report.files.items()}

    def write_manifest(self, step: int) -> None:
        """Write the manifest that makes the folder a checkpoint. What no rank hashed is hashed here."""
        files = dict(self._records)
        for name, size in list_sizes(self.folder).items():
            files.setdefault(name, FileRecord(size, compute_sha256(self.folder / name)))
        described = {name: asdict(files[name]) for name in sorted(files)}
        (self.folder / MANIFEST).write_text(json.dumps({"global_step": step, "files": described}, indent=1))


class Checkpoint:
    """Complete checkpoint.

    Args:
        folder: its place.
        records: size and hash of each file, by name.
    """

    def __init__(self, folder: Place, records: dict[str, FileRecord]):
        self.folder = folder
        self._records = records

    def records_of(self, model: str) -> dict[str, FileRecord]:
        """Return size and hash of the files of a model, by name in its folder."""
        prefix = f"{model}/"
        return {name.removeprefix(prefix): record for name, record in self._records.items() if name.startswith(prefix)}

    @contextmanager
    def local_copy(self, without: Sequence[str]) -> Iterator[Path]:
        """Yield a local folder with all files but those of some models, which ranks fetch. A local checkpoint is its
        own copy.

        Raises:
            CheckpointError: a file is not what was written, or cannot be read.
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
        """Add the remedy to the error of a downloaded file that is damaged."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if isinstance(self.folder, Path):
                raise
            raise CheckpointError(f"{error}; {_remedy(self.folder)}") from error


def verify(folder: str | Place) -> dict[str, FileRecord]:
    """Check that every file of the checkpoint is there with the hash it was written with; in an object store with its
    size (whoever downloads a file compares its hash). Returns: size and hash of each file.

    Raises:
        CheckpointError: one is not.
    """
    place = location(folder)
    try:
        manifest = json.loads(read_text(place / MANIFEST))
        records = {name: FileRecord(file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
        sizes = list_sizes(place)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place / MANIFEST} cannot be read ({error}); {_remedy(place)}") from error

    def damage_of(item: tuple[str, FileRecord]) -> str | None:
        name, expected = item
        if name not in sizes:
            return f"{place / name} is missing"
        if sizes[name] != expected.bytes:
            return f"{place / name} is not what was written (it has {sizes[name]} bytes, not {expected.bytes})"
        if isinstance(place, Path) and compute_sha256(place / name) != expected.sha256:
            return f"{place / name} is not what was written (its hash differs)"
        return None

    # In threads: hashing releases the interpreter's lock, and one core takes a second for about a gigabyte.
    with ThreadPoolExecutor() as threads:
        for damage in threads.map(damage_of, records.items()):
            if damage:
                raise CheckpointError(f"{damage}; {_remedy(place)}")
    return records


def check_all_seen(folder: Place, model: str, reports: Sequence[WrittenFiles]) -> None:
    """Raise CheckpointError unless this process sees every file that a rank of `model` wrote into `folder`.

    A file that is seen here proves that its writer's folder is this one; without that proof no manifest is written.

    Args:
        reports: one of each rank, in order.
    """
    for rank, report in enumerate(reports):
        for name, record in report.files.items():
            found = get_size(folder / name)
            if found == record.bytes:
                continue
            here = "does not see" if found is None else f"sees with {found} bytes"
            raise CheckpointError(
                f"{model} rank {rank} on node {report.node} wrote {name} ({record.bytes} bytes) into {folder}, which "
                f"node {get_node_name()} {here}: the folder is not shared by all nodes. Set trainer.ckpt_path (or "
                "trainer.run_dir) to a folder on a file system that every node sees"
            )


def _remedy(folder: Place) -> str:
    earlier = [path for path in list_checkpoint_dirs(folder.parent) if path.name != folder.name]
    choice = (
        f"trainer.resume_mode=from_path trainer.resume_path={earlier[-1]}" if earlier else "trainer.resume_mode=none"
    )
    return f"the checkpoint is damaged. Go on from another with {choice}."
