"""The engine dies, hangs, starts badly; what was accepted is done all the same, once."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_engine import DIE, HANG, STICK
from service_users import TIMEOUTS, Chain, Client, make_service, running, scripted, wait_until

from tx.tinker.engine.process import FROM_STDIN
from tx.tinker.service import crash_bisector
from tx.tinker.service.engine_link import EngineLink
from tx.tinker.service.results import TryAgain
from tx.tinker.service.service import TinkerService

pytestmark = pytest.mark.process
STANDBY = pytest.mark.parametrize("service", [{"standby_engine": True}], indirect=True)


@pytest.mark.slow
async def test_killed_engine_loses_no_request(tmp_path: Path):
    command = scripted(tmp_path / "state", commands_per_snapshot=4, seconds=0.01)
    async with running(tmp_path, command=command, standby_engine=True) as service:
        alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
        models = {alice: await alice.model(), bob: await bob.model(seed=3)}
        chains = {alice: Chain(models[alice]), bob: Chain(models[bob], seed=3)}
        base = await bob.sampler(0, base_model="tiny")
        for life in range(3):
            answers = []
            for seq in range(20 * life + 1, 20 * life + 21):
                for client, model in models.items():
                    step = await (client.train if seq % 2 else client.step)(model, seq)
                    chain = chains[client].train(seq) if seq % 2 else chains[client].step(seq)
                    answers.append((client, step, chain.state))
                answers.append((bob, await bob.sample(base, seq), "base"))
            await answers[18 * life][0].result(answers[18 * life][1])
            service.link.send_signal(signal.SIGKILL)
            for client, answer, state in answers:
                assert (await client.result(answer))["state"] == state
        assert service.link.deaths == 3


@pytest.fixture
def suspect_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was there at one death is suspected: each of them takes seconds in these tests."""
    monkeypatch.setattr(crash_bisector, "DEATHS_TO_BE_SUSPECTED", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("suspect_immediately")
@STANDBY
async def test_deadly_command_fails_and_others_complete(service: TinkerService, alice: Client, bob: Client):
    mine, his = await alice.model(), await bob.model()
    base = await bob.sampler(0, base_model="tiny")
    await alice.train(mine, 1)
    deadly = await alice.step(mine, 2, DIE)
    answers = [await bob.train(his, seq) for seq in range(1, 6)]
    samples = [await bob.sample(base, seq) for seq in range(5)]
    deadly_sample = await alice.sample(await alice.sampler(0, base_model="tiny"), 0, params={"temperature": DIE})
    for answer in (deadly, deadly_sample):
        stored = await alice.stored(answer)
        assert stored.category == "server"
        assert "the engine crashed on every attempt" in (stored.error or "")
        assert (stored.error or "").endswith("exit status 9"), "lines of the log are not for clients"
    last = await bob.result(answers[-1])
    assert last["state"] == Chain(his).train(1).train(2).train(3).train(4).train(5).state
    assert [(await bob.result(sample))["state"] for sample in samples] == ["base"] * 5
    after = await alice.result(await alice.train(mine, 3))
    assert after["state"] == Chain(mine).train(1).train(3).state, "the deadly step was not done"
    assert service.metrics()["engine_killers_total"] == 2


async def crash(service: TinkerService) -> None:
    """Imitate a kill of this process together with its engine: nothing more is written."""
    await service.link.close()
    for task in (*service.cleanup._tasks, *service.dispatch._tasks):
        task.cancel()
    await service.store.close()


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_request_crashing_server_is_found_after_restarts(
    tmp_path: Path, together: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(crash_bisector, "DEATHS_TO_BE_SUSPECTED", 2)  # each costs a start
    for life in range(3):
        service = make_service(tmp_path)
        await service.start()
        if life == 0:
            alice = await Client(service).begin()
            model = await alice.model()
            deadly = await alice.step(model, 1, STICK)
        await wait_until(lambda service=service: service.metrics().get("engine_training_pass_seconds"))
        await (crash(service) if together else service.close())
    async with running(tmp_path) as service:
        alice.service = service
        if together:
            error = (await alice.stored(deadly)).error or ""
            assert error == "the engine crashed on every attempt; last error: the server crashed with it"
            assert (await alice.result(await alice.train(model, 2)))["state"] == Chain(model).train(2).state
        else:
            await wait_until(lambda: service.metrics().get("engine_training_pass_seconds"))
            assert isinstance(await service.futures.retrieve("alice", deadly["request_id"], 0.1), TryAgain)


async def test_unrecorded_snapshots_of_dead_engine_are_removed(tmp_path: Path):
    async with running(tmp_path, command=scripted(tmp_path / "state", commands_per_snapshot=1)) as service:
        alice = await Client(service).begin()
        model = await alice.model()
        await alice.result(await alice.train(model, 1))
        await wait_until(lambda: service.state.runs[model].snapshot_seq == 1)
        folder = Path(service.state.runs[model].snapshot or "").parent
        for name in ("unrecorded", "half-written", "being-recorded"):
            (folder / name).mkdir()
        service.dispatch.recording.add(str(folder / "being-recorded"))
        service.link.send_signal(signal.SIGKILL)
        await wait_until(lambda: service.link.engine_generation == 2)
        kept = {path.name for path in folder.iterdir()}
        assert kept == {Path(service.state.runs[model].snapshot or "").name, "being-recorded"}
        assert (await alice.result(await alice.train(model, 2)))["state"] == Chain(model).train(1).train(2).state


@pytest.mark.usefixtures("suspect_immediately")
@pytest.mark.slow
async def test_hung_engine_is_replaced(alice: Client):
    base = await alice.sampler(0, base_model="tiny")
    hanging = await alice.sample(base, 0, params={"temperature": HANG})
    other = await alice.sample(base, 1)
    stored = await alice.stored(hanging, timeout=40)
    assert "it did not respond for 2 s" in (stored.error or "")
    assert (await alice.result(other))["state"] == "base"


@pytest.mark.usefixtures("suspect_immediately")
@pytest.mark.parametrize("what", ["training pass", pytest.param("sampling step", marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_engine_stuck_in_pass_is_replaced(tmp_path: Path, what: str):
    async with running(tmp_path, timeouts=replace(TIMEOUTS, turn=0.5)) as service:
        alice = await Client(service).begin()
        model, base = await alice.model(), await alice.sampler(0, base_model="tiny")
        if what == "training pass":
            stuck = await alice.step(model, 1, STICK)
        else:
            stuck = await alice.sample(base, 0, params={"temperature": STICK})
        other = await alice.sample(base, 1)
        stored = await alice.stored(stuck, timeout=40)
        why = f"a {what} took longer than 0.5 s (--pass-timeout-seconds)"
        assert why in (stored.error or "") and service.link.last_death == why
        assert (await alice.result(other))["state"] == "base"


async def test_requests_queue_while_engine_starts_and_client_is_notified(tmp_path: Path):
    go = tmp_path / "go"
    inner = scripted(tmp_path / "state")

    def slowly(address: str) -> list[str]:
        wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        return [sys.executable, "-c", wait + "os.execv(sys.argv[2], sys.argv[2:])", str(go), *inner(address)]

    async with running(tmp_path, command=slowly) as service:
        alice = await Client(service).begin()
        base = await alice.sampler(0, base_model="tiny")
        answer = await alice.sample(base, 0)
        waiting = await service.futures.retrieve("alice", answer["request_id"], 0.05)
        assert waiting == TryAgain(f"{base}:0", "paused_capacity", "the engine is starting")
        assert service.link.trouble == "the engine is starting"
        go.touch()
        assert (await alice.result(answer))["state"] == "base"
        assert service.link.trouble is None


async def test_failing_engine_start_is_retried_and_reported(tmp_path: Path):
    def broken(address: str) -> list[str]:
        return [sys.executable, "-c", "import sys; print('no such disk', flush=True); sys.exit(1)"]

    async with running(tmp_path, command=broken) as service:
        await wait_until(lambda: service.link.deaths >= 3)
        assert "exit status 1: no such disk" in (service.link.last_death or "")
        assert service.link.trouble == "the engine is being restarted: it ended with exit status 1", "clients read it"
        assert not service.fatal_config_error.is_set()


async def test_wrong_settings_are_not_tried_again(tmp_path: Path):
    def wrong(address: str) -> list[str]:
        return [sys.executable, "-c", "import sys; print('ConfigError: rank', flush=True); sys.exit(78)"]

    async with running(tmp_path, command=wrong) as service:
        await asyncio.wait_for(service.fatal_config_error.wait(), 20)
        assert service.link.trouble == "the engine cannot be started: it ended with exit status 78"
        assert service.link.last_death == "it ended with exit status 78: ConfigError: rank"
        await asyncio.sleep(0.5)
        assert service.link.deaths == 1


def pids_of(service: TinkerService) -> tuple[int, int]:
    """Return the process ids of the engine and of the standby process."""
    engine, standby = service.link.process, service.link.standby
    assert engine is not None and standby is not None and standby.process is not None
    return engine.pid, standby.process.pid


@STANDBY
@pytest.mark.slow
async def test_standby_process_becomes_next_engine(service: TinkerService, alice: Client, model: str):
    first = await alice.train(model, 1)
    seen = []
    for life in (1, 2):
        await wait_until(lambda: service.link.standby._waits)
        engine, standby = pids_of(service)
        seen.append(engine)
        service.link.send_signal(signal.SIGKILL)
        await wait_until(lambda life=life: service.link.ready and service.link.engine_generation == life + 1)
        assert service.link.process.pid == standby
    await wait_until(lambda: service.link.standby.process)
    assert len({*seen, *pids_of(service)}) == 4
    assert (await alice.result(await alice.train(model, 2)))["state"] == Chain(model).train(1).train(2).state
    assert (await alice.result(first))["state"] == Chain(model).train(1).state


async def test_unready_standby_process_is_not_awaited(tmp_path: Path):
    inner = scripted(tmp_path / "state")

    def command(address: str) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"] if address == FROM_STDIN else inner(address)

    async with running(tmp_path, command=command, standby_engine=True) as service:
        await wait_until(lambda: service.link.ready and service.link.standby.process)
        _, slow = pids_of(service)
        service.link.send_signal(signal.SIGKILL)
        await wait_until(lambda: service.link.ready and service.link.engine_generation == 2)
        with pytest.raises(ProcessLookupError):
            os.kill(slow, 0)


async def test_standby_process_needs_setting(service: TinkerService):
    await wait_until(lambda: service.link.ready)
    assert service.link.standby is None


async def test_closing_leaves_no_process(tmp_path: Path):
    async with running(tmp_path, standby_engine=True) as service:
        await wait_until(lambda: service.link.ready and service.link.standby.process)
        pids = pids_of(service)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list((tmp_path / "state" / "sockets").glob("*"))


async def test_unresponsive_engine_is_killed(tmp_path: Path):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    link = EngineLink(lambda address: [sys.executable, "-c", deaf], tmp_path, TIMEOUTS)

    async def died(why: str) -> None:
        raise AssertionError(why)

    link.start(lambda: None, lambda message: None, died)
    await wait_until(lambda: "deaf" in link.log_tail)
    await asyncio.wait_for(link.close(), 10)
    assert link.process is not None and link.process.returncode == -signal.SIGKILL
