"""Killed at any moment, the API, the engine or both: no user notices anything but a pause."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mixed_load import Story, tell_all
from plain_client import Client
from tx_server import ServerProcess

TENANTS = ("anna", "bela", "cleo")
VICTIMS = ("api", "engine", "both")


@pytest.mark.full  # minutes; test_kills_in_the_middle.py kills at each kind of moment
@pytest.mark.timeout(600)
async def test_kill_9_at_random_moments_is_seen_by_no_user(tmp_path: Path, tiny_model: Path):
    await undisturbed_and_disturbed(tmp_path, tiny_model, rounds=8, kills=6, seed=0)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
async def test_fifty_kills_are_seen_by_no_user(tmp_path: Path, tiny_model: Path, seed: int):
    await undisturbed_and_disturbed(tmp_path, tiny_model, rounds=40, kills=50, seed=seed)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_kills_are_invisible_to_users_on_postgresql(tmp_path: Path, tiny_model: Path, postgres: Any):
    urls = []
    for name in ("undisturbed", "disturbed"):
        postgres.run(f"CREATE DATABASE {name}")
        urls.append(postgres.url(name))
    await undisturbed_and_disturbed(tmp_path, tiny_model, rounds=8, kills=8, seed=3, databases=urls)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_kills_are_seen_by_no_user_of_adapters_in_parts(tmp_path: Path, tiny_model: Path):
    """Two processes train, and three models take turns in the memory for two."""
    settings = ["--backend-config", '{"num_processes": 2, "max_resident_models": 2}']
    await undisturbed_and_disturbed(tmp_path, tiny_model, rounds=4, kills=4, seed=4, settings=settings)


async def undisturbed_and_disturbed(
    folder: Path,
    base_model: Path,
    *,
    rounds: int,
    kills: int,
    seed: int,
    databases: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> None:
    def served(name: str) -> ServerProcess:
        options = ["--base-model", str(base_model), "--served-model-name", "tiny", *settings]
        options += [f"--database-url={url}" for url in databases if f"/{name}?" in url]
        return ServerProcess(folder / name, *options, tenants=TENANTS)

    with served("undisturbed") as server:
        async with AsyncExitStack() as stack:
            clients = await clients_of(server, stack)
            expected = await tell_all(clients, rounds)
            num_results = sum(len(client.results) for client in clients)
            checkpoints = await checkpoints_of(clients, expected)
            assert sum(client.num_resent for client in clients) == 0
    assert server.wait_until_no_engine() == []

    with served("disturbed") as server:
        async with AsyncExitStack() as stack:
            clients = await clients_of(server, stack)
            killing = asyncio.create_task(kill_now_and_then(server, clients, num_results, kills, random.Random(seed)))
            try:
                stories = await tell_all(clients, rounds)
                await killing
            finally:
                killing.cancel()
            for story, wanted in zip(stories, expected, strict=True):
                assert list(differences(story, wanted)) == []
            assert await checkpoints_of(clients, stories) == checkpoints
            for client in clients:
                for request_id, body in dict(client.results).items():
                    assert await client.fetch(request_id) == body, request_id
            await wait_for_single_engine(server)
    assert server.wait_until_no_engine() == []


async def clients_of(server: ServerProcess, stack: AsyncExitStack) -> list[Client]:
    return [await stack.enter_async_context(Client(server.url, server.key(tenant))) for tenant in TENANTS]


async def wait_for_single_engine(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while True:
        numbers = len(server.engines()), len(list((server.state / "sockets").glob("*")))
        if numbers in [(1, 1), (1, 0)]:  # 0: where the state folder's path is too long, sockets are elsewhere
            return
        assert time.monotonic() < deadline, f"engines, and their sockets: {numbers}"
        await asyncio.sleep(0.1)


async def kill_now_and_then(
    server: ServerProcess, clients: list[Client], num_results: int, kills: int, draw: random.Random
) -> None:
    """Spread over the load by what it got done; some while the last one's damage is being mended."""

    def num_done() -> int:
        return sum(len(client.results) for client in clients)

    for left in range(kills, 0, -1):
        if draw.random() < 0.7:
            moment = num_done() + draw.randint(1, max(1, (num_results - 10 - num_done()) // left))
            while num_done() < min(moment, num_results):
                await asyncio.sleep(0.002)
            await asyncio.sleep(draw.uniform(0, 0.05))
        else:
            await asyncio.sleep(draw.uniform(0, 4))
        victim = draw.choice(VICTIMS)
        print(f"at {num_done()} of {num_results}: kill {victim}")
        if victim != "api":
            server.kill_engine()
        if victim != "engine":
            server.kill()
            if draw.random() < 0.5:
                await asyncio.sleep(draw.uniform(0, 1))  # somebody has to notice first
            server.start()


def differences(story: Story, wanted: Story):
    for name in sorted(story.told.keys() | wanted.told.keys()):
        told, hoped = story.told.get(name, "nothing"), wanted.told.get(name, "nothing")
        if told != hoped:
            yield f"{name}: told {told!s:.200}; undisturbed {hoped!s:.200}"


async def checkpoints_of(clients: list[Client], stories: list[Story]) -> list[list[str]]:
    """Names, as listed; each is what was saved."""
    listed = []
    for client, story in zip(clients, stories, strict=True):
        rows = (await client.get("checkpoints")).json()["checkpoints"]
        names = sorted(row["tinker_path"].removeprefix(f"tinker://{story.model_id}/weights/") for row in rows)
        assert names == sorted(story.saved)
        listed.append(names)
    return listed
