"""kill -9 of a writing process at random moments: acknowledged writes survive, and none is partial.

TX_KILLS sets how often (5)."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlmodel import Session, select

from tx.tinker.storage import garbage
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import RequestRow, SessionRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import list_files
from tx.tinker.storage.store import Store

pytestmark = pytest.mark.process

WRITER = """
import asyncio, hashlib, os, secrets, sys
from pathlib import Path
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import RequestRow, SessionRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.manifests import list_files
from tx.tinker.storage.rows import add_row
from tx.tinker.storage.store import Store

url, state, life = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

async def client(number, store, blobs):
    for i in range(1_000_000):
        name, data = f"{life}.{number}.{i}", secrets.token_bytes(secrets.randbelow(200_000))
        blob = await asyncio.to_thread(blobs.put, data)
        def unit(session):  # two rows: both or none
            add_row(session, SessionRow, session_id=name, tenant="t", created_at=0.0, last_heartbeat_at=0.0)
            add_row(session, RequestRow, request_id=name, tenant=hashlib.sha256(data).hexdigest(), kind="train",
                    status="pending", created_at=0.0, payload=blob)
        await store.write(unit)
        os.write(1, f"row {name}\\n".encode())

async def folder_writer(number, folders):
    folder = folders.place(f"session_0:train:{number}", "weights", "a")
    for i in range(1_000_000):
        def save():
            with folders.writing(folder) as path:
                for part in range(3):
                    (path / f"{part}").write_text(f"{life}.{i} " * 10_000)
        await asyncio.to_thread(save)
        os.write(1, f"folder {number} {life}.{i}\\n".encode())

async def main():
    store = Store(url)
    await store.start()
    blobs, folders = Blobs(state / "blobs"), Folders(str(state / "base"), state / "cache")
    blobs.claim(store.database_id)
    os.write(1, b"ready\\n")
    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(client(number, store, blobs))
        for number in range(2):
            tasks.create_task(folder_writer(number, folders))

asyncio.run(main())
"""


def write_until_killed(url: str, state: Path, life: int, seconds: float) -> list[list[str]]:
    """Run a writer until it is killed. Returns the writes that were acknowledged."""
    command = [sys.executable, "-c", WRITER, url, str(state), str(life)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    lines, _ = process.communicate(timeout=30)
    return [line.split() for line in lines.decode().split("\n")[:-1]]


def check_folders(state: Path, told: dict[str, str]) -> None:
    folders = Folders(str(state / "base"), state / "cache")
    assert list((state / "base" / ".partial").iterdir()) == []
    for number, last in told.items():
        texts = [
            path.read_text()
            for path in list_files(folders.verified(folders.place(f"session_0:train:{number}", "weights", "a")))
        ]
        assert len(texts) == 3 and len(set(texts)) == 1
        life, i = map(int, texts[0].split()[0].split("."))
        assert texts[0] == f"{life}.{i} " * 10_000
        assert (life, i) >= tuple(map(int, last.split(".")))


async def check_rows(url: str, state: Path, told: set[str]) -> int:
    def rows(session: Session) -> tuple[set[str], list[RequestRow]]:
        return set(session.exec(select(SessionRow.session_id))), list(session.exec(select(RequestRow)))

    store = Store(url)
    await store.start()
    sessions, requests = await store.read(rows)
    blobs = Blobs(state / "blobs")
    assert sessions == {row.request_id for row in requests}
    assert told <= sessions
    for row in requests:
        assert row.payload is not None
        assert hashlib.sha256(blobs.get(row.payload)).hexdigest() == row.tenant
    left = await store.read(lambda session: garbage.find_unreferenced_blobs(session, blobs, min_age_seconds=0))
    for blob in left:
        blobs.drop(blob)
    assert blobs.all() == {row.payload for row in requests}
    await store.close()
    return len(left)


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def test_acknowledged_writes_survive_kill(database: str, tmp_path: Path, request: pytest.FixtureRequest):
    url = f"sqlite:///{tmp_path / 'tx.db'}"
    if database == "postgres":
        url = request.getfixturevalue("postgres_url")
    moments = random.Random(0)
    rows, folders, left = set(), {}, 0
    for life in range(int(os.environ.get("TX_KILLS", "5"))):
        for kind, *words in write_until_killed(url, tmp_path, life, moments.uniform(0.05, 0.6)):
            if kind == "row":
                rows.add(words[0])
            else:
                folders[words[0]] = words[1]
        left += await check_rows(url, tmp_path, rows)
        check_folders(tmp_path, folders)
    print(f"\n{len(rows)} rows, {left} leftover blobs")
    assert len(rows) > 10 and folders
