"""`tx recover` after the database was lost."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from stores import opened

from tx.errors import ConfigError
from tx.run import recover
from tx.tinker.service.checkpoints import Checkpoints
from tx.tinker.service.state import ServerState
from tx.tinker.storage.checkpoint_places import get_folder_parts
from tx.tinker.storage.db_models import SamplerRow
from tx.tinker.storage.store import Store
from tx.tinker.types import TinkerPath

RUN = "session_1:train:2"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def save(base: Path, kind: str, name: str, suffix: str = "") -> Path:
    folder = base / RUN / kind / name
    folder.mkdir(parents=True)
    (folder / f"adapter_config.json{suffix}").write_text(json.dumps({"r": 4}))
    save_file({LAYER: np.ones((4, 2), np.float32)}, folder / f"adapter_model.safetensors{suffix}")
    if kind == "weights":
        save_file({f"mean.{LAYER}": np.ones((4, 2), np.float32)}, folder / "optimizer.safetensors")
    return folder


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    folders = ["--state-dir", str(tmp_path / "state"), "--checkpoints-base", f"file://{tmp_path / 'checkpoints'}"]
    return ["--base-model", "folder/of/tiny", "--served-model-name", "tiny", *folders]


async def test_checkpoints_are_listed_again_and_can_be_loaded(tmp_path: Path, options: list[str], capsys):
    base = tmp_path / "checkpoints"
    save(base, "weights", "best@3")
    newest = save(base, "weights", "best@11")
    save(base, "sampler_weights", "step-1@4")
    save(base, "external_weights", "private@12", suffix=".age")
    orphan = save(base, "samplers", "0@5")  # without a name
    long = "n" * 200 + ".-" + "m" * 53
    place = get_folder_parts(TinkerPath(RUN, "weights", long), 6)
    save(base, "weights", "/".join(place[2:]))
    (save(base, "weights", "torn@9") / "optimizer.safetensors").write_bytes(b"\0" * 9)
    code = await run(recover.main, ["anna", *options])
    printed = capsys.readouterr().out
    assert code == 1, "one is damaged"
    for line in (
        f"added    tinker://{RUN}/weights/best\n",
        f"added    tinker://{RUN}/sampler_weights/step-1\n",
        f"added    tinker://{RUN}/external_weights/private\n",
        f"damaged  {base / RUN / 'weights' / 'torn@9'}: ",
        f"added    tinker://{RUN}/weights/{long}\n",
        f"unknown: 1 samplers without a name under {base}, 0.0 MB; --remove-samplers deletes them",
        f"4 of 4 checkpoints are new to sqlite:///{tmp_path / 'state' / 'tx.db'} and belong to anna\n",
    ):
        assert line in printed

    async with opened(f"sqlite:///{tmp_path / 'state' / 'tx.db'}") as store:
        checkpoints = Checkpoints(store, ServerState())
        source = await checkpoints.source("anna", f"tinker://{RUN}/weights/best", optimizer=True)
        assert (source.folder, source.base_model, source.lora.rank) == (str(newest), "tiny", 4)
        assert (source.lora.train_attn, source.lora.train_mlp, source.lora.train_unembed) == (True, False, False)
        listed: Any = await checkpoints.of_run("anna", RUN)
        assert len(listed["checkpoints"]) == 4
        assert await run(recover.main, ["anna", *options]) == 2, "a server uses it"
        assert "in use by another server" in capsys.readouterr().err

    shutil.rmtree(base / RUN / "weights" / "torn@9")
    assert orphan.is_dir()
    assert await run(recover.main, ["anna", *options, "--remove-samplers"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 4 checkpoints are new" in printed and "removed: 1 samplers" in printed
    assert not orphan.exists() and newest.is_dir()
    assert await run(recover.main, ["anna", *options, "--remove-samplers"]) == 0
    assert "samplers" not in capsys.readouterr().out


async def test_recovered_samplers_match_database_by_any_folder_path(tmp_path: Path, options: list[str], capsys):
    used = save(tmp_path / "checkpoints", "samplers", "0@5")
    assert await run(recover.main, options) == 0
    assert "unknown: 1 samplers" in capsys.readouterr().out
    async with opened(f"sqlite:///{tmp_path / 'state' / 'tx.db'}") as store:
        ids = {"sampler_id": "s:sample:0", "tenant": "local", "session_id": "s", "sampling_session_seq_id": 0}
        row = SamplerRow(**ids, base_model="tiny", created_at=0.0, ephemeral=True, folder=str(used))
        await store.write(lambda database: database.add(row))
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    options = [option.replace("/checkpoints", "/link") for option in options]
    assert await run(recover.main, [*options, "--remove-samplers"]) == 0
    assert "removed:" not in capsys.readouterr().out and used.is_dir()


async def run(main, arguments: list[str]) -> int:
    """Run a command, which has an event loop of its own."""
    return await asyncio.to_thread(main, arguments)


def test_there_is_nothing_to_recover_where_no_folder_is(options: list[str], capsys):
    assert recover.main(options) == 2
    assert "checkpoints_base: no folder" in capsys.readouterr().err


async def test_damaged_database_is_named_at_start_with_remedy(tmp_path: Path):
    path = tmp_path / "tx.db"
    async with opened(f"sqlite:///{path}"):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    for damaged in (b"\xff" * 8192, whole[: 4096 * 3] + b"\xff" * 4096 * 5 + whole[4096 * 8 :]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"tx\.db.*(\n.*)*`tx recover` lists the checkpoints on disk again"):
            await Store(f"sqlite:///{path}").start()
