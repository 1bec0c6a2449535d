"""`tx doctor --integrity`: check the files of a stopped server against their checksums and its database.

Read-only: nothing is created, migrated or removed. Each finding names the loss and the remedy.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import select
from sqlmodel import Session, col

from tx.errors import ConfigError
from tx.tinker.config import EngineConfig
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.database import Database
from tx.tinker.storage.db_models import CheckpointRow, ModelRow, RequestRow, SamplerRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import DamagedFilesError
from tx.tinker.types import TinkerPath


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    subject: str
    verdict: Literal["ok", "note", "wrong"]
    text: str
    """Finding and, unless all is well, the remedy."""


@dataclass
class _Kept:
    """Rows that name files."""

    checkpoints: list[tuple[str, str]]
    """Tinker path and folder of each."""
    samplers: list[tuple[str, str]]
    """Of samplers without a name."""
    snapshots: list[tuple[str, str]]
    """Of live models."""
    blobs: list[tuple[str, str]]
    """Request ids and blobs of payloads and results."""


def check_integrity(config: EngineConfig) -> Iterator[Finding]:
    """Yield a finding for each kind of file, and one for each that is damaged or missing."""
    state = config.state_folder
    try:
        if not state.is_dir():
            raise ConfigError(f"state_dir: no folder {state}; set --state-dir to that of the server")
        with Database(config.store_url).reading() as (database, version):
            if not version:
                raise ConfigError(f"database_url: {config.store_url} is not a server's database")
            kept = _read_rows(database)
    except ConfigError as error:
        yield Finding("integrity", "wrong", f"{error}; stop the server for this check, or fix the database first")
        return
    # Remote checkpoints are read through copies, for which the server's cache is not used.
    with tempfile.TemporaryDirectory() as cache:
        checkpoints = Folders(config.checkpoints_base, Path(cache), read_only=True)
        snapshots = Folders(str(state / "snapshots"), Path(cache), read_only=True)
        yield from _check_folders(kept, checkpoints, snapshots)
    yield from _check_blobs(kept, Blobs(state / "blobs", read_only=True), state / "blobs")


def _check_folders(kept: _Kept, checkpoints: Folders, snapshots: Folders) -> Iterator[Finding]:
    yield from _check(
        "checkpoint",
        kept.checkpoints,
        checkpoints,
        "restore its folder from a copy, or delete it (DELETE …/checkpoints)",
    )
    yield from _check(
        "sampler", kept.samplers, checkpoints, "its client must save the weights again; nothing else is affected"
    )
    yield from _check(
        "snapshot", kept.snapshots, snapshots, "the model is lost: create one from its last checkpoint (load_state)"
    )


def _check_blobs(kept: _Kept, blobs: Blobs, folder: Path) -> Iterator[Finding]:
    missing = [(request_id, blob) for request_id, blob in kept.blobs if not blobs.has(blob)]
    for request_id, blob in missing:
        text = f"{request_id}: its payload or result {blob} is missing in {folder}; this request fails"
        yield Finding("blob", "wrong", f"{text}: restore the folder from a copy, or send the request again")
    if not missing:
        yield Finding("blobs", "ok", f"{len(kept.blobs)} payloads and results found")


def _check(kind: str, kept: list[tuple[str, str]], folders: Folders, remedy: str) -> Iterator[Finding]:
    num_damaged = 0
    for name, folder in kept:
        try:
            folders.verified(folder)
        except DamagedFilesError as error:
            damage = str(error)
        except FileNotFoundError:
            damage = "the folder is missing"
        else:
            continue
        num_damaged += 1
        yield Finding(kind, "wrong", f"{name} in {folder}: {damage}. {remedy[0].upper()}{remedy[1:]}")
    if not num_damaged:
        yield Finding(f"{kind}s", "ok", f"{len(kept)} are intact")


def _read_rows(database: Session) -> _Kept:
    """Read the columns that databases of earlier releases have, too."""
    path = (col(CheckpointRow.model_id), col(CheckpointRow.kind), col(CheckpointRow.name))
    checkpoints = database.execute(select(*path, col(CheckpointRow.folder)).order_by(path[0]))
    samplers = database.execute(
        select(col(SamplerRow.sampler_id), col(SamplerRow.folder)).where(col(SamplerRow.ephemeral))
    )
    models = database.execute(
        select(col(ModelRow.model_id), col(ModelRow.snapshot)).where(col(ModelRow.status) == "live")
    )
    blobs = database.execute(select(col(RequestRow.request_id), col(RequestRow.payload), col(RequestRow.result_blob)))
    return _Kept(
        [(str(TinkerPath(run, kind, name)), folder) for run, kind, name, folder in checkpoints],  # pyright: ignore[reportArgumentType]
        [(sampler_id, folder) for sampler_id, folder in samplers if folder],
        [(model_id, snapshot) for model_id, snapshot in models if snapshot],
        [(request_id, blob) for request_id, *both in blobs for blob in both if blob is not None],
    )
