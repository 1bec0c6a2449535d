"""Killed while it creates, saves and loads; and by a request that is too much for it."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from plain_client import Client, Failed, Model
from random_data import data_of
from tx_server import ServerProcess

from tx.tinker.types import Datum
from tx.tinker.wire.codec import decode_pass_output

NUM_MODELS = 6


@asynccontextmanager
async def served(folder: Path, base_model: Path) -> AsyncIterator[tuple[ServerProcess, Client]]:
    with ServerProcess(folder, "--base-model", str(base_model), "--served-model-name", "tiny") as server:
        async with Client(server.url) as client:
            yield server, client
    assert server.wait_until_no_engine() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["engine", pytest.param("api", marks=pytest.mark.full)])
async def test_killed_while_it_creates_saves_and_loads(tmp_path: Path, tiny_model: Path, victim: str):
    draw = random.Random(victim)

    async def kill(server: ServerProcess) -> None:
        await asyncio.sleep(draw.uniform(0, 0.15))
        if victim == "api":
            server.kill()
            server.start()
        else:
            server.kill_engine()

    async with served(tmp_path, tiny_model) as (server, client):
        first = await Model.new(client, "tiny", rank=4, seed=1)
        await client.fetch(await first.train(data_of("cross_entropy", [20], 0)))  # the engine is there and warm

        async def disturbed(*work: Awaitable[Model]) -> list[Model]:
            doing = asyncio.gather(*work)
            await kill(server)
            return await doing

        async def create(i: int) -> Model:
            return await Model.new(client, "tiny", session_id=first.session_id, number=1 + i, rank=1 + i, seed=i)

        async def train_and_save(model: Model, i: int) -> Model:
            await model.train(data_of("cross_entropy", [30], i))
            await model.step(learning_rate=0.01)
            saved = json.loads(await client.fetch(await model.save("kept")))
            assert saved["path"] == f"tinker://{model.model_id}/weights/kept"
            return model

        # Each kill costs the start of an engine: some are created while others are saved.
        half = NUM_MODELS // 2
        earlier = [await create(i) for i in range(half)]
        saves = [train_and_save(model, i) for i, model in enumerate(earlier)]
        models = await disturbed(*saves, *(create(i) for i in range(half, NUM_MODELS)))
        for i, model in enumerate(models[half:], half):
            await train_and_save(model, i)
        listed = (await client.get("checkpoints")).json()["checkpoints"]
        assert {row["tinker_path"] for row in listed} == {f"tinker://{m.model_id}/weights/kept" for m in models}

        async def load(i: int) -> Model:
            body = {"session_id": first.session_id, "model_seq_id": 100 + i, "optimizer": True}
            await client.call("load_weights", body | {"path": f"tinker://{models[i].model_id}/weights/kept"})
            return Model(client, first.session_id, f"{first.session_id}:train:{100 + i}")

        loaded = await disturbed(*map(load, range(NUM_MODELS)))
        for original, copy in zip(models, loaded, strict=True):
            assert await next_losses(client, original) == await next_losses(client, copy)


async def next_losses(client: Client, model: Model) -> list[float]:
    """Return the losses of further steps, which are equal only if weights and optimizer are."""
    losses = []
    for _ in range(3):
        asked = await model.train(data_of("cross_entropy", [30], 50))
        await model.step(learning_rate=0.01)
        losses.append(decode_pass_output(await client.fetch(asked)).metrics["loss:sum"])
    return losses


# ---- a request that kills the engine whenever it is tried


class OutOfMemoryKiller:
    """Imitation of a system's out-of-memory killer: ends an engine that takes too much memory."""

    def __init__(self, server: ServerProcess, limit_bytes: int):
        self._server, self._limit, self.num_kills = server, limit_bytes, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "OutOfMemoryKiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            for engine in self._server.engines():
                with suppress(psutil.Error):
                    while engine.is_running() and not self._stop.wait(0.002):
                        if engine.memory_info().rss > self._limit:
                            engine.kill()
                            self.num_kills += 1
                            break
            self._stop.wait(0.01)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_engine_crashing_request_fails_and_others_complete(tmp_path: Path, tiny_model: Path):
    async with served(tmp_path, tiny_model) as (server, client):
        model, poisoned = [await Model.new(client, "tiny", rank=4, seed=i) for i in range(2)]
        before = await next_losses(client, poisoned)
        await next_losses(client, model)
        saving, sampler = await model.save_for_sampler()
        await client.fetch(saving)
        await client.fetch(await model.sample(sampler, 0, [5, 6], max_tokens=20))
        (engine,) = server.engines()
        with OutOfMemoryKiller(server, engine.memory_info().rss + (48 << 20)) as killer:
            huge = asyncio.create_task(client.fetch(await poisoned.train([much_of_a_datum()] * 90)))
            for i in range(1, 500):
                await next_losses(client, model)
                await client.fetch(await model.sample(sampler, i, [5, 6], max_tokens=20))
                if huge.done():
                    break
                await asyncio.sleep(0.2)
            with pytest.raises(Failed, match="the engine crashed on every attempt"):
                await asyncio.wait_for(huge, 300)
            after = await next_losses(client, poisoned)
        assert killer.num_kills >= 2
        assert after[0] < before[0], "what it had learned before is there, and it learns on"


def much_of_a_datum() -> Datum:
    """Half a megabyte: many targets a token."""
    targets = np.tile(np.arange(90), (500, 1))
    weights = np.full(targets.shape, 1e-3, np.float32)
    return Datum(np.full(500, 5), {"target_tokens": targets, "weights": weights})
