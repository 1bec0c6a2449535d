"""`tx doctor --integrity`: damage in a stopped server's folders, with remedies."""

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import text, update
from sqlmodel import Session, col
from stores import opened

from tx.run import doctor, recover
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, RequestRow
from tx.tinker.storage.folders import Folders

RUN = "session_1:train:0"


def write_checkpoint(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 4}')
    for name in ("adapter_model", "optimizer"):
        save_file({"layers.0.self_attn.q": np.ones(8, np.float32)}, folder / f"{name}.safetensors")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def add_rows(database: Session, snapshot: str, blob: str) -> None:
    database.execute(update(ModelRow).where(col(ModelRow.model_id) == RUN).values(status="live", snapshot=snapshot))
    row = {"tenant": "local", "kind": "train", "status": "pending", "created_at": time.time()}
    database.add(RequestRow(request_id=f"{RUN}:7", payload=blob, **row))


async def keep(state: Path, snapshot: str) -> str:
    blob = Blobs(state / "blobs").put(b"a payload")
    async with opened(f"sqlite:///{state / 'tx.db'}") as store:
        await store.write(lambda database: add_rows(database, snapshot, blob))
    return blob


@pytest.mark.parametrize("damage", ["nothing", "everything"])
def test_integrity_names_every_damaged_file_with_remedy(tmp_path: Path, capsys, damage: str):
    state, base = tmp_path / "state", tmp_path / "checkpoints"
    options = ["--state-dir", str(state), "--checkpoints-base", str(base), "--port", "0"]
    folders, snapshots = (Folders(str(folder), tmp_path / "cache") for folder in (base, state / "snapshots"))
    saved, snapshot = folders.place(RUN, "weights", "best@3"), snapshots.place(RUN, "00000003-ab")
    for where, folder in ((folders, saved), (snapshots, snapshot)):
        with where.writing(folder) as scratch:
            write_checkpoint(scratch)
    assert recover.main(["--base-model", "tiny", *options]) == 0
    blob = asyncio.run(keep(state, snapshot))
    if damage == "everything":
        flip(Path(saved, "optimizer.safetensors"))
        flip(Path(snapshot, "adapter_config.json"))
        Blobs(state / "blobs").drop(blob)
    capsys.readouterr()
    assert doctor.main([*options, "--integrity"]) == (damage == "everything")
    printed = capsys.readouterr().out
    if damage == "nothing":
        for line in ("1 are intact", "1 payloads and results found"):
            assert line in printed
        return
    for line in (
        f"tinker://{RUN}/weights/best in {saved}: optimizer.safetensors is damaged",
        "Restore its folder from a copy, or delete it",
        f"{RUN} in {snapshot}: adapter_config.json is damaged",
        "The model is lost: create one from its last checkpoint",
        f"{RUN}:7: its payload or result {blob} is missing",
    ):
        assert line in printed


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_integrity_changes_nothing_and_reads_older_schema(tmp_path: Path, capsys, end: str):
    state, base = tmp_path / "state", tmp_path / "checkpoints"
    options = ["--state-dir", str(state), "--checkpoints-base", str(base), "--port", "0"]
    (base / ".partial" / "of-a-dead-process").mkdir(parents=True)

    async def of_schema_1() -> None:
        async with opened(f"sqlite:///{state / 'tx.db'}") as store:
            await store.write(lambda database: database.execute(text("ALTER TABLE requests DROP COLUMN content")))
            await store.write(lambda database: database.execute(text("UPDATE schema SET version = 1")))
            if end == "killed":  # its log is read in place
                shutil.copytree(state, tmp_path / "copy")

    state.mkdir()
    asyncio.run(of_schema_1())
    if end == "killed":
        shutil.rmtree(state)
        (tmp_path / "copy").rename(state)
        assert (state / "tx.db-wal").stat().st_size
    before = contents(tmp_path)
    assert doctor.main([*options, "--integrity"]) == 0
    printed = capsys.readouterr().out
    assert "migrates its schema 1 at startup" in printed and "0 are intact" in printed
    after = contents(tmp_path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"state/tx.db-shm"}, "shared memory of sqlite, created for the log of a killed server"
    assert (base / ".partial" / "of-a-dead-process").is_dir()


def test_integrity_refuses_mistyped_folder_without_creating_it(tmp_path: Path, capsys):
    options = ["--state-dir", str(tmp_path / "stat"), "--checkpoints-base", str(tmp_path / "c"), "--port", "0"]
    assert doctor.main([*options, "--integrity"]) == 1
    assert f"no folder {tmp_path / 'stat'}; set --state-dir" in capsys.readouterr().out
    (tmp_path / "stat").mkdir()
    assert doctor.main([*options, "--integrity"]) == 1
    assert f"no file {tmp_path / 'stat' / 'tx.db'}; check --state-dir" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == ["stat"]
