"""Sessions: heartbeats, retention of results, restarts."""

import asyncio
import time
from pathlib import Path

import pytest
from service_users import Chain, Client, refused, restarted, running, wait_until, without_engine
from sqlalchemy import select, update

from tx.tinker.service.service import TinkerService
from tx.tinker.storage.db_models import ModelRow, SessionRow

pytestmark = pytest.mark.process


async def test_session_without_heartbeat_ends_and_unloads_models(tmp_path: Path):
    async with running(tmp_path, session_timeout_sec=2, session_cleanup_interval_sec=0) as service:
        await service.link.wait_for_info(30)
        silent, alive = await Client(service).begin(), await Client(service, "bob").begin()

        async def beat() -> None:
            while True:
                await service.sessions.heartbeat("bob", alive.session_id)
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beat())
        model, other = await silent.model(), await alive.model()
        await wait_until(lambda: silent.session_id not in service.state.sessions and model not in service.state.runs)
        await refused(410, service.sessions.heartbeat("alice", silent.session_id))
        await refused(404, silent.train(model, 1))
        assert (await alive.result(await alive.train(other, 1)))["state"] == Chain(other).train(1).state
        beating.cancel()
    async with running(tmp_path) as service:
        status = await service.store.read(lambda database: database.get_one(ModelRow, model).status)
        reason = await service.store.read(lambda database: database.get_one(SessionRow, silent.session_id).end_reason)
    assert (status, reason) == ("unloaded", "expired")


@pytest.mark.slow
@pytest.mark.parametrize("service", [{"session_timeout_sec": 2, "session_cleanup_interval_sec": 0}], indirect=True)
async def test_any_request_keeps_session_alive(service: TinkerService):
    await service.link.wait_for_info(30)
    trains, samples, polls = [await Client(service, tenant).begin() for tenant in ("alice", "bob", "carol")]
    model, base = await trains.model(), await samples.sampler(0, base_model="tiny")
    late = await polls.train(await polls.model(), 2)  # 1 never comes
    for seq in range(1, 40):
        await asyncio.gather(trains.train(model, seq), samples.sample(base, seq))
        await service.futures.retrieve("carol", late["request_id"], 0.1)
    assert {trains.session_id, samples.session_id, polls.session_id} <= service.state.sessions.keys()
    await wait_until(lambda: not service.state.sessions)


@pytest.mark.slow
async def test_session_timeout_restarts_after_server_restart(alice: Client, model: str, tmp_path: Path):
    await alice.train(model, 2)  # 1 is missing
    first = await alice.train(model, 1)
    await alice.result(first)
    long_ago = time.time() - 1e6
    beat = update(SessionRow).values(last_heartbeat_at=long_ago)
    await alice.service.store.write(lambda database: database.execute(beat))
    async with restarted(alice, tmp_path, session_timeout_sec=5, session_cleanup_interval_sec=0) as service:
        assert await service.sessions.heartbeat("alice", alice.session_id) == {"type": "session_heartbeat"}
        assert (await alice.result(first))["state"] == Chain(model).train(1).state
        assert (await alice.result(await alice.train(model, 3)))["state"] == (
            Chain(model).train(1).train(2).train(3).state
        )
        await service.cleanup.flush()
        rows = await service.store.read(lambda database: list(database.scalars(select(SessionRow))))
        assert rows[0].last_heartbeat_at > long_ago


async def test_accepted_requests_complete_after_restart(alice: Client, model: str, tmp_path: Path):
    answers = {seq: await alice.train(model, seq) for seq in (1, 2, 3, 5)}
    saving = await alice.save_sampler(model, 6, sampling_session_seq_id=0)
    sample = await alice.sample(await alice.sampler(1, base_model="tiny"), 0)
    async with restarted(alice, tmp_path):
        chain = Chain(model)
        for seq in (1, 2, 3):
            assert (await alice.result(answers[seq]))["state"] == chain.train(seq).state
        assert (await alice.result(sample))["state"] == "base"
        await refused(400, alice.sampler(0, base_model="tiny"), "is in use")
        await alice.train(model, 4)
        assert (await alice.result(answers[5]))["state"] == chain.train(4).train(5).state
        sampler = (await alice.result(saving))["sampling_session_id"]
        assert (await alice.result(await alice.sample(sampler, 0)))["state"] == chain.state


async def test_unload_completes_after_restart_without_restoring_model(alice: Client, model: str, tmp_path: Path):
    await without_engine(alice.service)
    gone = await alice.service.models.unload("alice", model)
    async with restarted(alice, tmp_path) as service:
        assert await alice.result(gone) == {"model_id": model, "type": "unload_model"}
        assert model not in service.state.runs


@pytest.mark.slow
async def test_models_of_session_ended_with_server_are_unloaded_at_restart(alice: Client, model: str, tmp_path: Path):
    ended = update(SessionRow).values(ended_at=time.time(), end_reason="finished")  # and then it was killed
    await alice.service.store.write(lambda database: database.execute(ended))
    async with restarted(alice, tmp_path):
        assert (await alice.result(f"{model}:unload"))["model_id"] == model


@pytest.mark.parametrize("service", [{"result_ttl_sec": 0}], indirect=True)
async def test_results_are_kept_temporarily_after_fetch(service: TinkerService, alice: Client, model: str):
    base = await alice.sampler(0, base_model="tiny")
    sample = await alice.sample(base, 0)
    passes = [await alice.train(model, seq) for seq in range(1, 7)]
    for answer in (sample, *passes):
        assert await alice.result(answer) == await alice.result(answer), "a lost answer is asked for again"
    await service.cleanup.flush()
    service.futures._cache.clear()
    await wait_until(lambda: service.state.runs[model].snapshot_seq >= 5)
    await service.cleanup.collect_garbage()
    for answer in (sample, passes[0]):
        await refused(410, alice.stored(answer))
    for unknown in (f"{model}:77", "nonsense", f"{model}x:1", f"{base}:one", ":", "a:1"):
        await refused(404, alice.stored(unknown))
    assert (await alice.result(await alice.train(model, 7)))["state"]
