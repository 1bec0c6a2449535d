"""`tx recover`: register checkpoints on disk in a new database after the old one was lost."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path

from safetensors import SafetensorError, safe_open
from sqlalchemy import select
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import ConfigError
from tx.tinker.command_line import read_config
from tx.tinker.config import EngineConfig
from tx.tinker.storage.checkpoint_places import find_places
from tx.tinker.storage.db_models import CheckpointRow, ModelRow, SamplerRow, SessionRow
from tx.tinker.storage.folders import Folders, remove_local_scheme
from tx.tinker.storage.manifests import list_files, verify
from tx.tinker.storage.store import Store
from tx.tinker.types import TinkerPath

_SAMPLERS = "*:train:*/samplers/*@*"
_RUN = re.compile(r"(?P<session>.+):train:(?P<number>\d+)")
REMOVE_SAMPLERS = "--remove-samplers"
"""Option of this command alone: delete the weights of samplers without a name that the database does not know."""
_REMEDY = f"{REMOVE_SAMPLERS} deletes them, including those of another server with the same checkpoints_base"
_WEIGHTS, _OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A whole checkpoint on disk."""

    path: TinkerPath
    seq: int
    """Seq of the request that saved it: of folders with the same name, the last counts."""
    folder: Path
    rank: int = 0
    layers: frozenset[str] = field(default_factory=frozenset)
    """Names of the tensors; none where they are encrypted."""

    def has(self, part: str) -> bool:
        """Return True if the adapter has a layer with this in its name."""
        return any(part in layer for layer in self.layers)


def main(argv: Sequence[str]) -> int:
    """Print a line for each checkpoint. Returns 1 if one cannot be read, 2 for invalid options."""
    try:
        removes, argv = REMOVE_SAMPLERS in argv, [word for word in argv if word != REMOVE_SAMPLERS]
        tenant, *options = argv if argv and not argv[0].startswith("-") else ("local", *argv)
        config = read_config(options)
        base = remove_local_scheme(config.checkpoints_base)
        if "://" in base:
            raise ConfigError(
                f"checkpoints_base: {base} is not a local folder; copy it to one, recover from the copy, and copy the "
                "state folder back"
            )
        folder = Path(base).expanduser().absolute()
        found, damaged = find_checkpoints(folder)
        states, samplers = asyncio.run(register(config, tenant, found, sorted(folder.glob(_SAMPLERS))))
        num_bytes = sum(file.stat().st_size for sampler in samplers for file in list_files(sampler))
        counted = f"{len(samplers)} samplers without a name under {folder}, {num_bytes / 1e6:,.1f} MB"
        for sampler in samplers if removes else ():
            Folders(base, config.state_folder / "cache").remove(str(sampler))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    lines = [
        *zip(states, (checkpoint.path for checkpoint in found), strict=True),
        *(("damaged", one) for one in damaged),
    ]
    for state, what in lines:
        print(f"{state:8} {what}")
    print(f"{states.count('added')} of {len(found)} checkpoints are new to {config.store_url} and belong to {tenant}")
    if samplers:
        print(f"removed: {counted}" if removes else f"unknown: {counted}; {_REMEDY}")
    return 1 if damaged else 0


def find_checkpoints(base: Path) -> tuple[list[FoundCheckpoint], list[str]]:
    """Find the newest folder of each checkpoint under `base`. Returns: complete folders, and the errors of the others.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not base.is_dir():
        raise ConfigError(f"checkpoints_base: no folder {base}")
    newest: dict[TinkerPath, FoundCheckpoint] = {}
    damaged = []
    for candidate in starmap(FoundCheckpoint, find_places(base)):
        if candidate.path in newest and newest[candidate.path].seq > candidate.seq:
            continue
        try:
            newest[candidate.path] = _read(candidate)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            damaged.append(f"{candidate.folder}: {error}")
    # A run is made of its first one: those with an optimizer tell most, encrypted ones nothing.
    ordered = sorted(newest.values(), key=lambda each: (not each.layers, each.path.kind != "weights", each.path))
    return ordered, damaged


def _read(found: FoundCheckpoint) -> FoundCheckpoint:
    folder = found.folder
    verify(folder)
    if found.path.kind == "external_weights" and (folder / f"{_WEIGHTS}.age").exists():
        return found
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    with safe_open(folder / _WEIGHTS, "np") as file:
        layers = frozenset(file.keys())
    if found.path.kind == "weights":
        with safe_open(folder / _OPTIMIZER, "np"):
            pass  # it can be read
    return FoundCheckpoint(found.path, found.seq, folder, rank, layers)


async def register(
    config: EngineConfig, tenant: str, found: list[FoundCheckpoint], samplers: Iterable[Path] = ()
) -> tuple[list[str], list[Path]]:
    """Insert checkpoints, their runs and sessions where they are missing.

    Returns: for each checkpoint `added`, `known`, or `no run` (encrypted, and no other trace of its run exists); and
        the `samplers` (folders) that no row references.

    Raises:
        ConfigError: the database cannot be used, for example because a server is using it.
    """
    config.state_folder.mkdir(parents=True, exist_ok=True)  # it may be what was lost
    store = Store(config.store_url)
    await store.start()
    try:
        states = await store.write(lambda database: [_add_rows(database, config, tenant, each) for each in found])
        known = await store.read(lambda database: set(database.scalars(select(col(SamplerRow.folder)))))
        # Below the base, not whole: this command may name it by another path than the server (a link, another machine).
        known_places = {Path(folder).parts[-3:] for folder in known if folder}
        return states, [folder for folder in samplers if folder.parts[-3:] not in known_places]
    finally:
        await store.close()


def _add_rows(database: Database, config: EngineConfig, tenant: str, found: FoundCheckpoint) -> str:
    run, kind, name = found.path
    if database.get(CheckpointRow, (run, kind, name)) is not None:
        return "known"
    matched, now = _RUN.fullmatch(run), time.time()
    assert matched is not None
    if database.get(ModelRow, run) is None:
        if not found.layers:
            return "no run"
        session_id = matched["session"]
        if database.get(SessionRow, session_id) is None:
            session = SessionRow(session_id=session_id, tenant=tenant, created_at=now, last_heartbeat_at=now)
            session.ended_at, session.end_reason = now, "finished"
            database.add(session)
            database.flush()
        model = ModelRow(
            model_id=run,
            tenant=tenant,
            session_id=session_id,
            model_seq_id=int(matched["number"]),
            base_model=config.served_names[-1],
            lora_rank=found.rank,
            lora_seed=0,
            train_attn=found.has("self_attn"),
            train_mlp=found.has("mlp"),
            train_unembed=found.has("lm_head"),
            status="unloaded",
            created_at=now,
            last_request_at=now,
        )
        database.add(model)
        database.flush()
    size = sum(file.stat().st_size for file in list_files(found.folder))
    row = CheckpointRow(
        model_id=run, kind=kind, name=name, tenant=tenant, folder=str(found.folder), created_at=now, size_bytes=size
    )
    database.add(row)
    database.flush()
    return "added"
