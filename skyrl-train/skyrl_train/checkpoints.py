"""Store of checkpoints, each complete or absent. Knows files, not their contents.

A checkpoint is written into a folder beside its final path, a manifest with the files' hashes last; every file is
flushed to the disk, and one rename puts the folder there (`utils.io.replacing`). Whatever kills the run,
`global_step_N` is complete or absent.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loguru import logger

from skyrl_train.config import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.training_backends.base import WrittenFiles
from skyrl_train.utils.io import expand_path, replacing, sha256_of, write_atomically
from skyrl_train.utils.nodes import node_name

GLOBAL_STEP_PREFIX = "global_step_"
MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"
_SUPERSEDED = "superseded_"


def extract_step_from_path(path: str | Path) -> int:
    """Return N of a path that ends in `global_step_N`; -1 if it does not."""
    match = re.fullmatch(rf"{GLOBAL_STEP_PREFIX}(\d+)", Path(path).name)
    return int(match.group(1)) if match else -1


def list_checkpoint_dirs(root: str | Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest step first."""
    folders = [path for path in Path(root).glob(f"{GLOBAL_STEP_PREFIX}*") if (path / MANIFEST).is_file()]
    return sorted((path for path in folders if extract_step_from_path(path) >= 0), key=extract_step_from_path)


class CheckpointStore:
    """Store of the checkpoints of one run.

    Args:
        root: their folder.
        max_to_keep: number of newest checkpoints to keep; negative: all.
    """

    def __init__(self, root: str | Path, max_to_keep: int = -1):
        self.root = expand_path(root)
        self._max_to_keep = max_to_keep

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a folder to write the checkpoint of `step` into. It becomes the checkpoint when the block ends well.

        Raises:
            CheckpointError: it could not be written (a full disk, say). Earlier checkpoints are as they were.
        """
        place = self.root / f"{GLOBAL_STEP_PREFIX}{step}"
        try:
            with replacing(place) as partial:
                yield partial
                _write_manifest(partial, step)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.root}: {error}. "
                f"Nothing of it is left; the newest complete one is {self._newest_name()}."
            ) from error
        self._remove_old()
        try:
            write_atomically(self.root / LATEST, f"{step}\n")
        except OSError as error:
            raise CheckpointError(
                f"{place} is complete, but {LATEST} beside it could not be written: {error}"
            ) from error

    def select(self, config: TrainerConfig) -> Path | None:
        """Return the checkpoint that `resume_mode` asks for, unread; None for a fresh start. Changes nothing.

        Raises:
            ConfigError: `resume_path` names no checkpoint.
        """
        if config.resume_mode in (None, "none"):
            return None
        if config.resume_mode == "latest":
            complete = list_checkpoint_dirs(self.root)
            return complete[-1] if complete else None
        folder = expand_path(config.resume_path or "")
        if extract_step_from_path(folder) < 0:
            raise ConfigError(
                f"trainer.resume_path must end in {GLOBAL_STEP_PREFIX}N, the folder of one checkpoint; got {folder}"
            )
        if not (folder / MANIFEST).is_file():
            raise ConfigError(f"trainer.resume_path: there is no complete checkpoint at {folder}")
        return folder

    def find(self, config: TrainerConfig) -> Path | None:
        """Return the checkpoint to resume from, verified against its manifest, and rename later ones; None for a fresh
        start.

        Raises:
            ConfigError: `resume_path` names no checkpoint.
            CheckpointError: its files are not what was written.
        """
        folder = self.select(config)
        if folder is None:
            self._rename_later(after_step=-1)
            return None
        verify(folder)
        is_own = folder.parent.resolve() == self.root.resolve()
        self._rename_later(after_step=extract_step_from_path(folder) if is_own else -1)
        return folder

    def _rename_later(self, after_step: int) -> None:
        """Rename checkpoints after the step that the run resumes from: they are of a branch that the run has left, and
        must be neither resumed from nor counted among those to keep."""
        for newer in list_checkpoint_dirs(self.root):
            if extract_step_from_path(newer) > after_step:
                aside = self.root / f"{_SUPERSEDED}{newer.name}"
                shutil.rmtree(aside, ignore_errors=True)
                newer.rename(aside)
                logger.warning(f"{newer} is later than the step resumed from; renamed to {aside.name}")

    def _remove_old(self) -> None:
        if self._max_to_keep < 0:
            return
        for folder in list_checkpoint_dirs(self.root)[: -self._max_to_keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def _newest_name(self) -> str:
        complete = list_checkpoint_dirs(self.root)
        return complete[-1].name if complete else "none"


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of the checkpoint is there with the hash it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, str | int]] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error}); {_remedy(folder)}") from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_remedy(folder)}")
        if path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]:
            raise CheckpointError(f"{path} is not what was written (its hash differs); {_remedy(folder)}")


def check_all_seen(folder: Path, model: str, reports: Sequence[WrittenFiles]) -> None:
    """Raise CheckpointError unless this process sees every file that a rank of `model` wrote into `folder`.

    A file that is seen here proves that its writer's folder is this one; without that proof no manifest is written.

    Args:
        reports: one of each rank, in order.
    """
    for rank, report in enumerate(reports):
        for name, size in report.sizes.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found == size:
                continue
            here = "does not see" if found is None else f"sees with {found} bytes"
            raise CheckpointError(
                f"{model} rank {rank} on node {report.node} wrote {name} ({size} bytes) into {folder}, which node "
                f"{node_name()} {here}: the folder is not shared by all nodes. Set trainer.ckpt_path (or "
                "trainer.run_dir) to a folder on a file system that every node sees"
            )


def _remedy(folder: Path) -> str:
    earlier = [path for path in list_checkpoint_dirs(folder.parent) if path.name != folder.name]
    choice = (
        f"trainer.resume_mode=from_path trainer.resume_path={earlier[-1]}" if earlier else "trainer.resume_mode=none"
    )
    return f"the checkpoint is damaged. Go on from another with {choice}."


def _write_manifest(folder: Path, step: int) -> None:
    """Write the manifest that makes the folder a checkpoint."""
    files = {
        str(path.relative_to(folder)): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"global_step": step, "files": files}, indent=1))
